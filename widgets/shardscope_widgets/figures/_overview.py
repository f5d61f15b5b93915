"""Loss, throughput, bytes sent and memory of several runs: a large plot and three small ones, and the memory alone.

Memory is the peak of a rank's tensors: the states that ZeRO shards in full colour, the rest faint. For a run that does
not report it, the growth of its processes is shown instead.

The figure has a fixed number of slots for runs (`MOST_RUNS`), and each slot always has the same traces, so that
updates of a live figure only change values and never add traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.figures import FIGURES
from shardscope_widgets.figures import _curves, theme
from shardscope_widgets.figures._curves import PLAIN, SMOOTHING, LossView, RunCurvesInfo, resize_notes
from shardscope_widgets.figures._stacks import FAINT, STATES
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.trace import Trace, named_apart
from shardscope_widgets.words import bytes_text, safe

MOST_RUNS = 8
TRACES_A_RUN = 7
HEIGHT = 460
LEGEND_ENTRIES_A_LINE, LEGEND_LINE_PX = 4, 20
_LEFT, _RIGHT = [0.0, 0.57], [0.67, 1.0]
_TOP, _MIDDLE, _BOTTOM, _WHOLE = [0.76, 1.0], [0.4, 0.62], [0.0, 0.26], [0.0, 1.0]
_BLANK = {
    f"{name}axis{n or ''}": {
        "showticklabels": False,
        "range": [0, 1],
        "autorange": False,
        "uirevision": "blank",
    }
    for name in "xy"
    for n in (0, 2, 3, 4)
}
"""Axis settings without tick labels, for a figure without data."""
_FREE = {name: {"autorange": True, "uirevision": "data"} for name in _BLANK}
"""Axis settings for a figure with data, which undo the settings of `_BLANK`."""
NOTHING: list[dict[str, Any]] = [{"x": [], "y": [], "visible": True}] * TRACES_A_RUN
"""Empty traces for one run, which keep the axes visible if there is no data."""
_NEAR = 0.02
"""Relative difference up to which the ranks of a run are drawn as one bar."""
_AXES = (("x", "y"), ("x2", "y2"), ("x3", "y3"), ("x4", "y4"))


class OverviewInfo(NamedTuple):
    """Curves and bars of the four plots."""

    loss: RunCurvesInfo
    throughput: RunCurvesInfo
    traffic: RunCurvesInfo
    memory: MemoryInfo


def overview_info(
    traces: Sequence[Trace], *, most: int | None = MOST_RUNS, view: LossView = PLAIN
) -> OverviewInfo:
    """Return the data of the first `most` runs in `traces` (None for all), with the loss drawn according to `view`."""
    shown = traces[:most]
    return OverviewInfo(
        _curves.loss_info(shown, view),
        _curves.throughput_info(shown),
        _curves.traffic_info(shown),
        memory_info(shown),
    )


def run_properties(info: OverviewInfo) -> list[list[dict[str, Any]]]:
    """Return the properties of the `TRACES_A_RUN` traces of each run."""
    places = []
    for index in range(len(info.loss.curves)):
        lines = [
            line
            for curves in (info.loss, info.throughput)
            for line in _curves.curve_lines(curves.curves[index], curves.unit)
        ]
        traffic = _curves.curve_lines(info.traffic.curves[index], "B")[1]
        places.append([*lines, traffic, *memory_bars(info.memory.runs[index])])
    return [
        [line | {"showlegend": number == 1, "visible": True} for number, line in enumerate(p)] for p in places
    ]


def overview_layout(info: OverviewInfo) -> dict[str, Any]:
    """Return the part of the layout that depends on the data: the headings, the loss axis and its marks."""
    unit = info.throughput.unit
    span = info.loss.view.smoothing
    smooth = f"bold: {span}-step average" if span > 1 else ""
    headings = (
        ("Loss", smooth or "mean over all ranks", _LEFT, _WHOLE),
        ("Throughput", f"{unit}, all ranks", _RIGHT, _TOP),
        ("Bytes sent", "per step, all ranks", _RIGHT, _MIDDLE),
        (*info.memory.title, _RIGHT, _BOTTOM),
    )
    layout: dict[str, Any] = {
        "annotations": [_heading(title, note, x[0], y[1]) for title, note, x, y in headings]
        + _curves.divergence_notes(info.loss)
        + resize_notes(info.throughput, x="x2", y="y2")
    }
    if not any(curve.steps for curve in info.loss.curves):
        return layout | _BLANK
    return layout | _FREE | {"yaxis": _curves.loss_axis(info.loss)}


def _heading(title: str, note: str, x: float, y: float) -> dict[str, Any]:
    text = f'<b>{title}</b>  <span style="font-size:11px">{note}</span>'
    return theme.note(text, x=x, y=y) | {"yshift": 6}


def empty(figure: go.Figure, places: int = MOST_RUNS) -> go.Figure:
    """Add the axes and the unused traces of `places` runs to `figure`, and return it."""
    for _ in range(places):
        for column in (0, 0, 1, 1, 2):
            figure.add_trace(go.Scatter(xaxis=_AXES[column][0], yaxis=_AXES[column][1], visible=False))
        for _ in range(2):
            figure.add_trace(go.Bar(xaxis=_AXES[3][0], yaxis=_AXES[3][1], visible=False))
    small = {"nticks": 3}
    figure.update_layout(
        xaxis=theme.axis("step", domain=_LEFT, anchor="y"),
        yaxis=_curves.value_axis("") | {"domain": _WHOLE, "anchor": "x", "nticks": 8},
        xaxis2=theme.axis(domain=_RIGHT, anchor="y2", matches="x"),
        yaxis2=_curves.value_axis("/s") | {"domain": _TOP, "anchor": "x2"} | small,
        xaxis3=theme.axis(domain=_RIGHT, anchor="y3", matches="x"),
        yaxis3=_curves.value_axis("B") | {"domain": _MIDDLE, "anchor": "x3"} | small,
        xaxis4=theme.axis(domain=_RIGHT, anchor="y4", showgrid=False, type="category"),
        yaxis4=memory_axis() | {"domain": _BOTTOM, "anchor": "x4"} | small,
    )
    return theme.style(figure, height=HEIGHT, barmode="group", bargap=0.35, bargroupgap=0.08)


def overview(traces: Sequence[Trace], *, smoothing: int = SMOOTHING, is_log: bool = False) -> go.Figure:
    """Draw loss, throughput, bytes sent and memory growth of any number of runs; see `loss` for the options."""
    info = overview_info(traces, most=None, view=LossView(smoothing, is_log))
    places = run_properties(info)
    figure = empty(go.Figure(), len(places))
    for index, properties in enumerate(line for place in places for line in place):
        figure.data[index].update(properties)
    figure.update_layout(overview_layout(info))
    lines = -(-len(places) // LEGEND_ENTRIES_A_LINE)
    head = 48 + LEGEND_LINE_PX * max(1, lines)
    return figure.update_layout(height=HEIGHT - 40 + head, margin_t=head, legend=theme.LEGEND_ABOVE)


class MemoryBars(NamedTuple):
    """Peak memory of one run in bytes, by rank: of the tensors, and of the processes.

    Attributes:
        label: Name of the run.
        look: Style of the run.
        ranks: Names of the bars: one for each rank, or one for all ranks if they hold the same.
        states: Parameters, gradients and optimizer state, in bytes; equal to `peaks` if types are unknown.
        peaks: Bytes at which the bars end.
        process_bytes: Peak memory of the processes, in bytes.
    """

    label: str
    look: RunStyle
    ranks: tuple[str, ...]
    states: tuple[int, ...]
    peaks: tuple[int, ...]
    process_bytes: tuple[int, ...]


class MemoryInfo(NamedTuple):
    """Peak memory of several runs, with one set of bars per run.

    `is_held` is true for the peak of tensors, and false for the growth of processes.
    """

    runs: tuple[MemoryBars, ...]
    is_held: bool

    @property
    def text(self) -> str:
        """What the bars show; empty for the growth of processes."""
        return (
            "In memory bars, full colour shows parameters, gradients and optimizer state; the fainter part is the rest."
            if self.is_held
            else ""
        )

    @property
    def title(self) -> tuple[str, str]:
        """Heading of the plot, and an explanation."""
        figure = FIGURES["held_bytes" if self.is_held else "process_bytes"]
        return figure.title.capitalize(), "" if self.is_held else "peak"


def memory_info(traces: Sequence[Trace]) -> MemoryInfo:
    """Return the peak memory of each rank so far, for each run: of its tensors if any run reports it."""
    looks = theme.run_looks(traces)
    is_held = any(trace.held for trace in traces)
    bars = [
        _bars(trace, look, is_held=is_held) for trace, look in zip(named_apart(traces), looks, strict=True)
    ]
    are_alike = all(_is_level(run.peaks) and _is_level(run.states) for run in bars)
    return MemoryInfo(tuple(map(_one_for_all, bars) if are_alike else bars), is_held)


def _bars(trace: Trace, look: RunStyle, *, is_held: bool) -> MemoryBars:
    ranks = sorted(trace.held if is_held else trace.peak_memory)
    grown = tuple(trace.peak_memory.get(rank, 0) for rank in ranks)
    peaks = tuple(trace.peaks[rank] for rank in ranks) if is_held else grown
    states = tuple(sum(trace.held[rank][kind] for kind in STATES) for rank in ranks) if is_held else grown
    return MemoryBars(trace.label, look, tuple(f"rank {rank}" for rank in ranks), states, peaks, grown)


def _is_level(values: tuple[int, ...]) -> bool:
    return not values or max(values) - min(values) <= _NEAR * max(values)


def _one_for_all(run: MemoryBars) -> MemoryBars:
    """Return a run with a single bar for all ranks."""
    if len(run.ranks) < 2:
        return run
    most = (max(values) for values in (run.states, run.peaks, run.process_bytes))
    return MemoryBars(run.label, run.look, ("each rank",), *((value,) for value in most))


def memory_bars(bars: MemoryBars) -> list[dict[str, Any]]:
    """Return the trace properties of one run's bars: the states, and above them the rest, which is fainter."""
    rest = [peak - states for peak, states in zip(bars.peaks, bars.states, strict=True)]
    hover = [
        f"{safe(bars.label)}<br>{rank}: states {bytes_text(states)}, peak {bytes_text(peak)}; its process grew by "
        f"{bytes_text(grown)}"
        for rank, states, peak, grown in zip(bars.ranks, bars.states, bars.peaks, bars.process_bytes, strict=True)
    ]  # fmt: skip
    common = {
        "x": bars.ranks,
        "name": bars.label,
        "marker": theme.striped(bars.look, white=0.65, size=6, solidity=0.25) | {"line": {"width": 0}},
        "customdata": hover,
        "hovertemplate": "%{customdata}<extra></extra>",
        "legendgroup": bars.label,
        "offsetgroup": bars.label,
    }
    return [common | {"y": bars.states}, common | {"y": rest, "base": bars.states, "opacity": FAINT}]


def memory_axis() -> dict[str, Any]:
    """Return settings of the value axis for memory bars."""
    return theme.axis(tickformat="~s", ticksuffix="B", rangemode="tozero", nticks=5)


def memory(traces: Sequence[Trace]) -> go.Figure:
    """Draw the peak memory of each rank, for several runs: the states that ZeRO shards, and the rest fainter."""
    info = memory_info(traces)
    bars = [bar | {"showlegend": n == 0} for run in info.runs for n, bar in enumerate(memory_bars(run))]
    figure = go.Figure([go.Bar(bar) for bar in bars])
    figure.update_layout(
        xaxis=theme.axis(showgrid=False), yaxis=memory_axis() | {"title": {"text": info.title[0]}}
    )
    return theme.style(figure, height=320, showlegend=True)
