"""Gantt chart of one step on each rank: measured activities above, simulated ones below, on one time axis.

Each row has computation in its upper part and communication in its lower part, over a grey track as long as the rank's
step, whose visible parts are idle time. The last row has the terms of the prediction, one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.axes import collective_of
from shardscope.runlog.spans import Interval, covered, union
from shardscope.runlog.step_events import MESSAGE, StepEvents
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._ghosts import GhostPart
from shardscope_widgets.figures._timeline import COMPUTE, IDLE
from shardscope_widgets.words import collective_text, duration_text, listed

MOST_RANKS = 8
"""Maximum number of ranks that are drawn."""
_SENT, _RECEIVED = "send", "recv"  # on an axis, or of all ranks
_ROW, _GAP, _FRAME = 25, 14, 84
"""Heights in pixels of one row, of the gap between two ranks, and of the rest of the figure."""
_FAINT = {"measured": 1.0, "simulated": 0.72, "predicted": 0.5}
_SHARES = {True: 0.62, False: 0.3}
"""Height of a bar relative to its row, for computation and for communication."""


class TwinBar(NamedTuple):
    """One activity of a row; times in milliseconds from the start of the step."""

    name: str
    start_ms: float
    duration_ms: float
    is_computing: bool


class TwinRow(NamedTuple):
    """One row: the activities of one rank, either measured, simulated or predicted.

    Attributes:
        rank: The rank; None for the prediction, which is of the rank with the most work.
        origin: ``measured``, ``simulated`` or ``predicted``.
        bars: The activities, in order of their start.
        start_ms: Start of the rank's step. Ranks need not start at the same time.
        total_ms: Length of the rank's step, from the start of its first activity to the end of its last.
    """

    rank: int | None
    origin: str
    bars: tuple[TwinBar, ...]
    start_ms: float
    total_ms: float

    @property
    def busy_ms(self) -> float:
        """Milliseconds in which the rank computes or communicates; a rank that only waits to receive is idle."""
        busy = (bar for bar in self.bars if collective_of(bar.name) != _RECEIVED)
        return covered((bar.start_ms, bar.start_ms + bar.duration_ms) for bar in busy)


class TwinInfo(NamedTuple):
    """The rows of the chart, with rows of one rank next to each other; `hidden` is the number of ranks left out."""

    label: str
    step: int
    rows: tuple[TwinRow, ...]
    hidden: int = 0

    def of(self, origin: str) -> tuple[TwinRow, ...]:
        """Return the rows with this origin, by rank."""
        return tuple(row for row in self.rows if row.origin == origin)


def twin_info(
    measured: StepEvents | None,
    simulated: StepEvents | None = None,
    predicted: Sequence[GhostPart] = (),
    *,
    label: str = "",
) -> TwinInfo:
    """Return the rows of the chart.

    Args:
        measured: A recorded step of a run, such as one from `Run.step_events`; None if no step has spans.
        simulated: A simulated step, such as `Simulation.timeline`; None omits the simulated rows.
        predicted: Parts of the predicted step; an empty sequence omits the predicted row.
        label: Name of the run; by default the name in the measured step.
    """
    if measured is None:
        return TwinInfo(label, 0, ())
    ranks = range(min(measured.world_size, MOST_RANKS))
    rows = []
    for rank in ranks:
        rows.append(_row(rank, "measured", measured))
        if simulated is not None:
            rows.append(_row(rank, "simulated", simulated))
    if predicted:
        rows.append(_predicted_row(predicted))
    return TwinInfo(label or measured.label, measured.step, tuple(rows), measured.world_size - len(ranks))


def _row(rank: int, origin: str, step: StepEvents) -> TwinRow:
    bars = _bars(step, rank)
    start = min((bar.start_ms for bar in bars), default=0.0)
    end = max((bar.start_ms + bar.duration_ms for bar in bars), default=0.0)
    return TwinRow(rank, origin, bars, start, end - start)


def _bars(step: StepEvents, rank: int) -> tuple[TwinBar, ...]:
    """Return a rank's activities. Messages count as communication of both ranks; adjacent messages are merged."""
    found: dict[tuple[str, bool], list[Interval]] = {}
    spans = {event.kind for event in step.events if event.rank == rank and event.lane == "communication"}
    for event in step.events:
        at = (event.start_s * 1e3, event.end_s * 1e3)
        if event.lane != MESSAGE and event.rank == rank:
            name = event.kind.split(" for ")[0]
            found.setdefault((name, event.lane == COMPUTE), []).append(at)
        elif event.lane == MESSAGE and rank in (event.rank, event.peer) and event.kind not in spans:
            is_received = collective_of(event.kind) == _SENT and event.peer == rank
            name = event.kind.removesuffix(_SENT) + _RECEIVED if is_received else event.kind
            found.setdefault((name, False), []).append(at)
    bars = [
        TwinBar(name, start, end - start, is_computing)
        for (name, is_computing), intervals in found.items()
        for start, end in (intervals if is_computing else union(intervals))
        if end > start
    ]
    return tuple(sorted(bars, key=lambda bar: bar.start_ms))


def _predicted_row(parts: Iterable[GhostPart]) -> TwinRow:
    bars, at = [], 0.0
    for part in parts:
        if part.part != IDLE:
            bars.append(TwinBar(part.name, at, part.seconds * 1e3, part.part in _COMPUTED))
        at += part.seconds * 1e3
    return TwinRow(None, "predicted", tuple(bars), 0.0, at)


_COMPUTED = frozenset({"data", "forward", "backward", "optimizer"})


def twin_text(info: TwinInfo) -> str:
    """Return sentences on the measured, simulated and predicted length of the step, and on the ranks' idle time."""
    if not info.rows:
        return (
            "No step was recorded with the spans of all ranks; launch the run with Record(spans_first=100)."
        )
    lengths, idle = [], []
    for origin in ("measured", "simulated", "predicted"):
        rows = info.of(origin)
        if rows:
            longest = max(row.total_ms for row in rows)
            lengths.append(f"{duration_text(longest / 1e3)} {origin}")
            if origin != "predicted":
                share = 1 - sum(row.busy_ms for row in rows) / (sum(row.total_ms for row in rows) or 1.0)
                idle.append(f"{max(share, 0.0):.0%} of the {origin} step")
    text = f"Step {info.step}: {listed(lengths)}. On average, a rank is idle for {listed(idle)}."
    if info.hidden:
        text += f" Ranks 0 to {MOST_RANKS - 1} of {MOST_RANKS + info.hidden} are drawn."
    return text


def twin_parts(info: TwinInfo) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return traces and layout of the chart as Plotly JSON: one trace for each kind of activity, after the tracks."""
    places = _places(info)
    kinds = dict.fromkeys(bar.name for row in info.rows for bar in row.bars)
    traces = [_tracks(info, places)]
    traces += [trace for name in kinds for trace in _kind(info, places, name)]
    return traces, _layout(info, places)


def _places(info: TwinInfo) -> list[float]:
    """Return the vertical centre of each row in pixels; rows of one rank follow each other, ranks have a gap."""
    places, at = [], 0.0
    for number, row in enumerate(info.rows):
        if number and row.rank != info.rows[number - 1].rank:
            at += _GAP
        places.append(at + _ROW / 2)
        at += _ROW
    return places


def _tracks(info: TwinInfo, places: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "name": IDLE, "showlegend": True, "legendgroup": IDLE,
        "base": [row.start_ms for row in info.rows], "x": [row.total_ms for row in info.rows], "y": list(places),
        "width": _ROW * 0.94, "marker": {"color": theme.IDLE.colour, "line": {"width": 0}},
        "hovertext": [
            f"<b>{row.origin}</b>{'' if row.rank is None else f', rank {row.rank}'}<br>step of "
            f"{duration_text(row.total_ms / 1e3)}"
            for row in info.rows
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "text": [f" {duration_text(row.total_ms / 1e3)}" for row in info.rows], "textposition": "outside",
        "textfont": {"size": 11, "color": theme.GREY}, "cliponaxis": False,
    }  # fmt: skip


def _kind(info: TwinInfo, places: Sequence[float], name: str) -> list[dict[str, Any]]:
    """Return the bars of one kind of activity, one trace for each origin because bars of a trace share an opacity."""
    traces: list[dict[str, Any]] = []
    for origin in ("measured", "simulated", "predicted"):
        chosen = [
            (bar, place, row)
            for row, place in zip(info.rows, places, strict=True)
            for bar in row.bars
            if bar.name == name and row.origin == origin
        ]
        if chosen:
            traces.append(_trace(name, origin, chosen, is_first=not traces))
    return traces


def _trace(
    name: str, origin: str, chosen: Sequence[tuple[TwinBar, float, TwinRow]], *, is_first: bool
) -> dict[str, Any]:
    title, look = collective_text(name), theme.span_look(name)
    return {
        "type": "bar", "orientation": "h", "name": title, "legendgroup": name, "showlegend": is_first,
        "base": [bar.start_ms for bar, *_ in chosen], "x": [bar.duration_ms for bar, *_ in chosen],
        "y": [_centre(bar, place) for bar, place, _ in chosen],
        "width": [_ROW * _SHARES[bar.is_computing] for bar, *_ in chosen],
        "opacity": _FAINT[origin], "marker": theme.striped(look, size=5, solidity=0.22) | {"line": {"width": 0}},
        "hovertext": [
            f"<b>{title}</b>, {origin}: {duration_text(bar.duration_ms / 1e3)}"
            + ("" if row.rank is None else f"<br>rank {row.rank}")
            for bar, _, row in chosen
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def _centre(bar: TwinBar, place: float) -> float:
    """Return the vertical centre of a bar: computation is at the top of its row, communication at the bottom."""
    return place + _ROW * (0.16 - _SHARES[True] / 4 if bar.is_computing else 0.32)


def _layout(info: TwinInfo, places: Sequence[float]) -> dict[str, Any]:
    height = (places[-1] + _ROW / 2) if places else _ROW
    longest = max((row.start_ms + row.total_ms for row in info.rows), default=1.0)
    names = [_row_name(row) for row in info.rows]
    return {
        "height": round(height) + _FRAME,
        "xaxis": theme.axis("milliseconds", range=[0, longest * 1.11], rangemode="tozero"),
        "yaxis": theme.axis(
            showgrid=False, fixedrange=True, tickvals=list(places), ticktext=names, range=[height + 3, -3]
        ),
    }


def _row_name(row: TwinRow) -> str:
    if row.rank is None:
        return f"{row.origin} "
    return f"<b>rank {row.rank}</b> {row.origin} " if row.origin == "measured" else f"{row.origin} "


def empty_twin() -> go.Figure:
    """Return the chart without rows, as the template of a live figure."""
    return theme.style(go.Figure(), height=_FRAME + _ROW, barmode="overlay", head=44)


def twin(
    measured: StepEvents, simulated: StepEvents | None = None, predicted: Sequence[GhostPart] = ()
) -> go.Figure:
    """Draw the measured step of each rank above its simulated step.

    Example:
        >>> twin(run.step_events(), ss.simulate(run.job).timeline)  # doctest: +SKIP
    """
    info = twin_info(measured, simulated, predicted)
    traces, layout = twin_parts(info)
    figure = empty_twin()
    figure.add_traces(traces)
    return figure.update_layout(layout)
