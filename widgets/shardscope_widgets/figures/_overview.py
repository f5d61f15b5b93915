"""Loss, throughput, bytes sent and memory of several runs: four plots in one figure, and the memory alone.

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
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.trace import Trace, named_apart

MOST_RUNS = 8
TRACES_A_RUN = 6
HEIGHT = 440
LEGEND_ENTRIES_A_LINE, LEGEND_LINE_PX = 4, 20
_GAP = 0.11
_LEFT, _RIGHT = [0.0, 0.5 - _GAP / 2], [0.5 + _GAP / 2, 1.0]
_TOP, _BOTTOM = [0.58, 1.0], [0.0, 0.42]
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
        places.append([*lines, traffic, memory_bars(info.memory.runs[index])])
    return [
        [line | {"showlegend": number == 1, "visible": True} for number, line in enumerate(p)] for p in places
    ]


def overview_layout(info: OverviewInfo) -> dict[str, Any]:
    """Return the part of the layout that depends on the data: the headings, the loss axis and its marks."""
    unit = info.throughput.unit
    span = info.loss.view.smoothing
    smooth = f"bold: {span}-step average" if span > 1 else ""
    headings = (
        ("Loss", smooth or "mean over all ranks", _LEFT, _TOP),
        ("Throughput", f"{unit}, all ranks", _RIGHT, _TOP),
        ("Bytes sent", "per step, all ranks", _LEFT, _BOTTOM),
        (FIGURES["process_bytes"].title.capitalize(), "peak", _RIGHT, _BOTTOM),
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
        figure.add_trace(go.Bar(xaxis=_AXES[3][0], yaxis=_AXES[3][1], visible=False))
    figure.update_layout(
        xaxis=theme.axis(domain=_LEFT, anchor="y"),
        yaxis=_curves.value_axis("") | {"domain": _TOP, "anchor": "x"},
        xaxis2=theme.axis(domain=_RIGHT, anchor="y2", matches="x"),
        yaxis2=_curves.value_axis("/s") | {"domain": _TOP, "anchor": "x2"},
        xaxis3=theme.axis("step", domain=_LEFT, anchor="y3", matches="x"),
        yaxis3=_curves.value_axis("B") | {"domain": _BOTTOM, "anchor": "x3"},
        xaxis4=theme.axis(domain=_RIGHT, anchor="y4", showgrid=False, type="category"),
        yaxis4=memory_axis() | {"domain": _BOTTOM, "anchor": "x4"},
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
    """Peak memory of the processes of one run, in bytes, by rank."""

    label: str
    look: RunStyle
    ranks: tuple[int, ...]
    process_bytes: tuple[int, ...]


class MemoryInfo(NamedTuple):
    """Peak memory of several runs, with one set of bars per run."""

    runs: tuple[MemoryBars, ...]


def memory_info(traces: Sequence[Trace]) -> MemoryInfo:
    """Return the peak memory of each rank's process so far, for each run."""
    looks = theme.run_looks(traces)
    return MemoryInfo(tuple(map(_bars, named_apart(traces), looks)))


def _bars(trace: Trace, look: RunStyle) -> MemoryBars:
    ranks = tuple(sorted(trace.peak_memory))
    return MemoryBars(trace.label, look, ranks, tuple(trace.peak_memory[rank] for rank in ranks))


def memory_bars(bars: MemoryBars) -> dict[str, Any]:
    """Return the trace properties of one run's bars."""
    return {
        "x": [f"rank {rank}" for rank in bars.ranks],
        "y": bars.process_bytes,
        "name": bars.label,
        "marker": theme.striped(bars.look, white=0.65, size=6, solidity=0.25) | {"line": {"width": 0}},
        "hovertemplate": "%{fullData.name}<br>%{x}: %{y:.3s}B<extra></extra>",
        "legendgroup": bars.label,
    }


def memory_axis() -> dict[str, Any]:
    """Return settings of the value axis for memory bars."""
    return theme.axis(tickformat="~s", ticksuffix="B", rangemode="tozero", nticks=5)


def memory(traces: Sequence[Trace]) -> go.Figure:
    """Draw the peak memory of each rank's process, for several runs."""
    figure = go.Figure([go.Bar(memory_bars(bars)) for bars in memory_info(traces).runs])
    figure.update_layout(
        xaxis=theme.axis(showgrid=False),
        yaxis=memory_axis() | {"title": {"text": FIGURES["process_bytes"].title}},
    )
    return theme.style(figure, height=320, showlegend=True)
