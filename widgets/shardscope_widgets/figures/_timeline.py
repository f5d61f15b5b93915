"""Timeline of every rank's activity: one row per rank, with one lane each for compute and communication.

A rank is idle when it has no span in any lane within the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.spans import Interval, covered, union
from shardscope_widgets.figures import theme
from shardscope_widgets.trace import Trace, TraceSpan
from shardscope_widgets.words import bytes_text, collective_text, duration_text, listed

COMPUTE, COMMUNICATION, IDLE = "compute", "communication", "idle"
BLANK = {"showticklabels": False, "range": [0, 1]}
"""Axis settings without tick labels, for a timeline without data."""
MOST_KINDS = 14
"""Maximum number of span kinds in a live timeline; further kinds are not drawn."""
_SHORTEST_IDLE_MS = 0.05
SPANS = {
    "agreement": "ranks compare digests to check that all have run the same layers",
    "backward": "backward pass: computing gradients",
    "broadcast": "one rank sends its buffers to all others",
    "clip": "clipping the norm of the gradient",
    "data": "reading and preparing samples",
    "decode": "decompressing gradients",
    "encode": "compressing gradients before they are sent",
    "forward": "forward pass: computing the loss",
    IDLE: "neither computing nor communicating",
    "optimizer": "updating the parameters",
    "recompute": "recomputing activations that were not kept",
}
"""Descriptions of kinds of spans whose names may not explain them."""


class SpanBar(NamedTuple):
    """One span; times are in milliseconds from the start of the window."""

    rank: int
    lane: str
    name: str
    start_ms: float
    duration_ms: float
    num_bytes: int
    step: int


class Shares(NamedTuple):
    """Fractions of the window, 0 to 1, averaged over ranks; `hidden` is communication that overlaps with compute."""

    compute: float
    communication: float
    hidden: float
    idle: float


class TimelineInfo(NamedTuple):
    """A window of steps: its bars, the start of each step in milliseconds, and the breakdown of the time."""

    label: str
    world_size: int
    steps: tuple[int, ...]
    starts_ms: tuple[float, ...]
    end_ms: float
    bars: tuple[SpanBar, ...]
    shares: Shares


def timeline_info(trace: Trace, *, last_step: int | None = None, num_steps: int = 2) -> TimelineInfo:
    """Return a window of at most `num_steps` consecutive steps with recorded spans.

    The window ends at `last_step`, or at the newest step by default.
    """
    known = [step for step in trace.complete_span_steps() if last_step is None or step <= last_step]
    steps = tuple(_consecutive(known)[-num_steps:])
    if not steps:
        return TimelineInfo(trace.label, trace.world_size, (), (), 0.0, (), Shares(0, 0, 0, 0))
    spans = [(step, span) for step in steps for span in trace.spans[step]]
    zero = min(span.start for _, span in spans)
    bars = [_bar(step, span, zero) for step, span in spans]
    end = max(bar.start_ms + bar.duration_ms for bar in bars)
    starts = tuple(min(bar.start_ms for bar in bars if bar.step == step) for step in steps)
    idle = [gap for rank in range(trace.world_size) for gap in _idle(rank, bars, starts, steps, end)]
    return TimelineInfo(
        trace.label,
        trace.world_size,
        steps,
        starts,
        end,
        tuple(bars + idle),
        _shares(bars, trace.world_size, end),
    )


def _consecutive(steps: Sequence[int]) -> Sequence[int]:
    """Return the last sequence of consecutive steps.

    Later in a run, only some steps are recorded, and a gap between recorded steps would look like idle time.
    """
    first = len(steps) - 1
    while first > 0 and steps[first - 1] == steps[first] - 1:
        first -= 1
    return steps[max(first, 0) :]


def _bar(step: int, span: TraceSpan, zero: float) -> SpanBar:
    start, length = (span.start - zero) * 1e3, (span.end - span.start) * 1e3
    return SpanBar(span.rank, span.lane, span.name, round(start, 4), round(length, 4), span.num_bytes, step)


def _idle(
    rank: int, bars: Sequence[SpanBar], starts: Sequence[float], steps: Sequence[int], end: float
) -> list[SpanBar]:
    busy = union(_intervals(bar for bar in bars if bar.rank == rank))
    edges = [(0.0, 0.0), *busy, (end, end)]
    gaps = [(left[1], right[0]) for left, right in pairwise(edges)]
    return [
        SpanBar(
            rank,
            IDLE,
            IDLE,
            start,
            stop - start,
            0,
            max((s for s, t in zip(steps, starts, strict=True) if t <= start)),
        )
        for start, stop in gaps
        if stop - start >= _SHORTEST_IDLE_MS
    ]


def _intervals(bars: Iterable[SpanBar]) -> list[Interval]:
    return [(bar.start_ms, bar.start_ms + bar.duration_ms) for bar in bars]


def _shares(bars: Sequence[SpanBar], world_size: int, end: float) -> Shares:
    total = end * world_size or 1.0
    compute = communication = both = 0.0
    for rank in range(world_size):
        own = [bar for bar in bars if bar.rank == rank]
        computing = _intervals(bar for bar in own if bar.lane == COMPUTE)
        other = _intervals(bar for bar in own if bar.lane != COMPUTE)
        compute += covered(computing)
        communication += covered(other)
        both += covered(computing + other)
    hidden = compute + communication - both
    return Shares(compute / total, communication / total, hidden / total, max(0.0, 1 - both / total))


def timeline_text(info: TimelineInfo) -> str:
    """Return sentences on the fractions of the time in which a rank computes, communicates or waits, and is idle.

    Communication includes waiting for a peer to send or to receive, and communication during which the rank also
    computes, as in predictions and explanations. The fractions add up to 1.
    """
    if not info.steps:
        return "No step has finished yet."
    sent, idle = round(100 * info.shares.communication), round(100 * info.shares.idle)
    is_hidden = info.shares.hidden > 0.005
    hidden = f" (including {info.shares.hidden:.0%} in which it also computes)" if is_hidden else ""
    parts = [
        f"{100 - sent - idle}% computing{' only' * is_hidden}",
        f"{sent}% communicating or waiting{hidden}",
        f"{idle}% idle",
    ]
    which = f"step {info.steps[0]}" if len(info.steps) == 1 else f"steps {info.steps[0]} to {info.steps[-1]}"
    time = duration_text(info.end_ms / 1e3)
    return f"{info.label}, {which} ({time}): on average, a rank spends {listed(parts)}."


def gap_text(info: TimelineInfo, known: Sequence[int], asked: int) -> str:
    """Return a sentence that says why fewer steps are shown than requested; empty if all requested steps are shown.

    Args:
        info: The window.
        known: Steps with recorded spans.
        asked: Number of steps requested.
    """
    before = [step for step in known if info.steps and step < info.steps[0]]
    if len(info.steps) >= asked or not before:
        return ""
    return f"The previous recorded step is step {before[-1]}. "


def timeline_bars(info: TimelineInfo) -> list[dict[str, Any]]:
    """Return the properties of one trace per kind of span: idle first, then in order of first appearance."""
    kinds = {bar.name: None for bar in sorted(info.bars, key=lambda bar: (bar.name != IDLE, bar.start_ms))}
    lanes = _lanes(info)
    return [_kind(name, [bar for bar in info.bars if bar.name == name], lanes) for name in kinds]


def _lanes(info: TimelineInfo) -> list[str]:
    rest = {bar.lane for bar in info.bars} - {COMPUTE, IDLE}
    return [COMPUTE, *sorted(rest)] if rest else [COMPUTE]


def _kind(name: str, bars: list[SpanBar], lanes: list[str]) -> dict[str, Any]:
    idle = name == IDLE
    look = theme.IDLE if idle else theme.span_look(name)
    height = 0.8 / len(lanes)
    places = [bar.rank if idle else bar.rank - 0.4 + height * (lanes.index(bar.lane) + 0.5) for bar in bars]
    return {
        "orientation": "h",
        "base": [bar.start_ms for bar in bars],
        "x": [bar.duration_ms for bar in bars],
        "y": places,
        "width": 0.8 if idle else height * 0.9,
        "name": collective_text(name),
        "marker": theme.striped(look, size=5, solidity=0.22) | {"line": {"width": 0}},
        "hovertext": [_hover(bar) for bar in bars],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": True,
        "visible": True,
    }


def _hover(bar: SpanBar) -> str:
    size = f"<br>{bytes_text(bar.num_bytes)}" if bar.num_bytes else ""
    name, length = collective_text(bar.name), duration_text(bar.duration_ms / 1e3)
    return f"<b>{name}</b>, {length}<br>rank {bar.rank}, step {bar.step}{size}"


def timeline_layout(info: TimelineInfo) -> dict[str, Any]:
    """Return the part of the layout that depends on the data: rows, step marks and time range."""
    lines = [theme.rule(theme.AXIS, x=t, width=1, dash="dot") for t in info.starts_ms]
    labels = [
        theme.note(f"step {step}", x=t, y=1) | {"xref": "x", "font": {"size": 11, "color": theme.GREY}}
        for step, t in zip(info.steps, info.starts_ms, strict=True)
    ]
    ranks = list(range(info.world_size))
    if not info.steps:
        return {"xaxis": BLANK, "yaxis": BLANK, "height": timeline_height(info.world_size)}
    return {
        "shapes": lines,
        "annotations": labels,
        "xaxis": {"range": [0, info.end_ms * 1.01]},
        "yaxis": {
            "tickvals": ranks,
            "ticktext": [f"rank {rank} " for rank in ranks],
            "range": [info.world_size - 0.5, -0.5],
        },
        "height": timeline_height(info.world_size),
    }


def timeline_height(world_size: int) -> int:
    """Return the height of the figure in pixels."""
    return 118 + min(46, max(18, 320 // world_size)) * world_size


def empty(figure: go.Figure, kinds: int = MOST_KINDS) -> go.Figure:
    """Add the axes and `kinds` unused traces to `figure`, and return it."""
    figure.add_traces([go.Bar(orientation="h", visible=False) for _ in range(kinds)])
    figure.update_layout(
        xaxis=theme.axis("milliseconds", rangemode="tozero", ticksuffix=""),
        yaxis=theme.axis(showgrid=False, fixedrange=True),
    )
    legend = {"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0, "xanchor": "left"}
    return theme.style(
        figure,
        height=timeline_height(2),
        barmode="overlay",
        legend=legend,
        margin={"l": 8, "r": 12, "t": 62, "b": 8},
    )


def draw(info: TimelineInfo) -> go.Figure:
    """Draw one row per rank, with one bar per span."""
    bars = timeline_bars(info)
    figure = empty(go.Figure(), len(bars))
    for index, properties in enumerate(bars):
        figure.data[index].update(properties)
    return figure.update_layout(timeline_layout(info))


def timeline(trace: Trace, *, last_step: int | None = None, num_steps: int = 2) -> go.Figure:
    """Draw the activity of every rank in a window of steps, by default the newest two.

    Args:
        trace: The run.
        last_step: Last step of the window; the newest step by default.
        num_steps: Maximum number of steps in the window.
    """
    return draw(timeline_info(trace, last_step=last_step, num_steps=num_steps))
