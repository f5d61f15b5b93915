"""The measured schedule of a pipeline: one row per rank, one bar for each pass of each micro-batch.

The bubble is the fraction of time that ranks are idle between the first and last operation of the step. The measured
bubble is shown next to the ideal one, computed from the schedule's table for stages of equal cost: for GPipe and 1F1B
it is (p - 1) / (m + p - 1) with p stages and m micro-batches per pass (Huang et al., GPipe, NeurIPS 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.analytic.schedules import build
from shardscope.errors import SpecError
from shardscope.spec import registry
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope_widgets.figures import theme
from shardscope_widgets.trace import Trace, TraceOp
from shardscope_widgets.words import plural, safe, seconds_text

OP_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}
ROW_PX = 46


class GanttOp(NamedTuple):
    """One operation.

    Times are in milliseconds from the start of the step's first operation. `turn` is the index of the stage among those
    of its rank.
    """

    rank: int
    op: str
    stage: int
    turn: int
    microbatch: int
    start_ms: float
    duration_ms: float


class GanttInfo(NamedTuple):
    """One step: its operations, its duration, its measured bubble, and the bubble of the schedule's table (`ideal`)."""

    label: str
    schedule: str
    step: int
    ranks: tuple[str, ...]
    num_stages: int
    num_micro_batches: int
    ops: tuple[GanttOp, ...]
    end_ms: float
    bubble: float
    ideal: float | None


def complete_schedule_steps(trace: Trace) -> list[int]:
    """Return the steps whose schedule every rank has reported, in order."""
    return sorted(n for n, ops in trace.ops.items() if len({op.rank for op in ops}) == trace.world_size)


def gantt_info(trace: Trace, *, last_step: int | None = None) -> GanttInfo:
    """Return the data of the newest step (up to `last_step`, if given) whose schedule every rank has reported."""
    known = [step for step in complete_schedule_steps(trace) if last_step is None or step <= last_step]
    ranks = tuple(trace.name_of(rank) for rank in range(trace.world_size))
    if not known:
        return GanttInfo(trace.label, trace.schedule, 0, ranks, 0, 0, (), 0.0, 0.0, None)
    ops = sorted(trace.ops[known[-1]], key=lambda op: (op.start, op.rank))
    zero = ops[0].start
    end_ms = (max(op.end for op in ops) - zero) * 1e3
    stages = max(op.stage for op in ops) + 1
    parts = max(op.microbatch for op in ops) + 1
    busy_ms = sum(op.end - op.start for op in ops) * 1e3
    turns = _turns(ops)
    return GanttInfo(
        trace.label, trace.schedule, known[-1], ranks, stages, parts, tuple(_bar(op, zero, turns) for op in ops),
        round(end_ms, 4), max(0.0, 1 - busy_ms / (end_ms * trace.world_size)),
        _ideal(trace, stages, parts // trace.passes),
    )  # fmt: skip


def _ideal(trace: Trace, stages: int, microbatches: int) -> float | None:
    """Return the bubble of the schedule's table; None if the schedule is unknown or its table cannot be built."""
    if trace.order is None and registry.find(PipelineSchedule, trace.schedule) is None:
        return None
    schedule = trace.order or trace.schedule
    try:
        ideal: float = build(
            schedule, trace.world_size, microbatches, stages // trace.world_size
        ).bubble_fraction
    except SpecError:  # a user's schedule that has since been redefined
        return None
    return ideal


def _turns(ops: Sequence[TraceOp]) -> dict[tuple[int, int], int]:
    """Return the index of each stage among the stages of its rank, by (rank, stage)."""
    stages: dict[int, list[int]] = {}
    for rank, stage in sorted({(op.rank, op.stage) for op in ops}):
        stages.setdefault(rank, []).append(stage)
    return {(rank, stage): turn for rank, own in stages.items() for turn, stage in enumerate(own)}


def _bar(op: TraceOp, zero: float, turns: dict[tuple[int, int], int]) -> GanttOp:
    start, length = (op.start - zero) * 1e3, (op.end - op.start) * 1e3
    return GanttOp(
        op.rank, op.op, op.stage, turns[op.rank, op.stage], op.microbatch, round(start, 4), round(length, 4)
    )


def gantt_text(info: GanttInfo) -> str:
    """Describe the chart in words."""
    if not info.ops:
        return "No schedule has been recorded yet: it appears once a pipeline has finished its first step."
    ideal = (
        ""
        if info.ideal is None
        else "; with stages of equal cost and backward passes twice as long as forward ones it would be "
        f"{info.ideal:.0%}"
    )
    parts = "1 micro-batch" if info.num_micro_batches == 1 else f"{info.num_micro_batches} micro-batches"
    return (
        f"{info.label}, step {info.step}, {seconds_text(info.end_ms / 1e3)}: {parts} through "
        f"{plural(info.num_stages, 'stage')} on {plural(len(info.ranks), 'rank')}. Ranks are idle for "
        f"{info.bubble:.0%} of the time{ideal}."
    )


def gantt_title(info: GanttInfo) -> str:
    """Return the title of the chart: schedule, step and bubble."""
    ideal = "" if info.ideal is None else f", {info.ideal:.0%} with equal stages"
    return f"<b>{safe(info.schedule or 'pipeline')}</b>, step {info.step}: bubble {info.bubble:.0%} measured{ideal}"


def draw_gantt(info: GanttInfo) -> go.Figure:
    """Draw the figure for `info`."""
    figure = go.Figure(bars(info, lambda places: _measured_hover(info, places)))
    figure.update_layout(
        xaxis=theme.axis("milliseconds", range=[0, info.end_ms * 1.005 or 1]),
        yaxis=rank_axis(info.ranks),
        annotations=[theme.note(gantt_title(info), x=0, y=1) | {"yshift": 4}] if info.ops else [],
        uniformtext={"minsize": 9, "mode": "hide"},
    )
    return theme.style(
        figure, height=116 + ROW_PX * len(info.ranks), barmode="overlay", margin={"l": 8, "r": 12, "t": 62, "b": 8},
        legend=theme.LEGEND_ABOVE,
    )  # fmt: skip


def rank_axis(ranks: Sequence[str]) -> dict[str, Any]:
    """Return settings of an axis with a row for each rank, the first on top."""
    return theme.axis(
        tickvals=list(range(len(ranks))), ticktext=[f"{name} " for name in ranks], range=[len(ranks) - 0.5, -0.5],
        showgrid=False, fixedrange=True,
    )  # fmt: skip


Hover = Callable[[Sequence[int]], dict[str, Any]]
"""Function that takes indices into `GanttInfo.ops` and returns the hover settings of their trace."""


def bars(info: GanttInfo, hover: Hover, *, with_text: bool = True) -> list[dict[str, Any]]:
    """Return one trace for each kind of operation and each stage index within a rank, as Plotly JSON."""
    groups: dict[tuple[str, int], list[int]] = {}
    for place, bar in enumerate(info.ops):
        groups.setdefault((bar.op, bar.turn), []).append(place)
    turns = max((turn for _, turn in groups), default=0) + 1
    keys = sorted(groups, key=lambda key: ("FBIW".find(key[0]), key[1]))
    return [
        _group([info.ops[at] for at in groups[key]], turns, with_text) | hover(groups[key]) for key in keys
    ]


def _group(own: Sequence[GanttOp], turns: int, with_text: bool) -> dict[str, Any]:
    op, turn = own[0].op, own[0].turn
    look = theme.OP_LOOKS.get(op, theme.span_look(op))
    colour = theme.tint(look.colour, turn / turns)
    name = OP_NAMES.get(op, op)
    return {
        "type": "bar",
        "orientation": "h",
        "base": [bar.start_ms for bar in own],
        "x": [bar.duration_ms for bar in own],
        "y": [bar.rank for bar in own],
        "width": 0.82,
        "name": name if turns == 1 else f"{name}, {_nth(turn)} stage of its rank",
        "text": [str(bar.microbatch) for bar in own],
        "textposition": "inside" if with_text else "none",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": theme.ink_on(colour), "size": 11},
        "marker": {
            "color": colour,
            "line": {"width": 0.6, "color": "rgba(255,255,255,0.75)"},
            "pattern": {
                "shape": look.pattern,
                "fillmode": "overlay",
                "fgcolor": "rgba(255,255,255,0.5)",
                "size": 7,
                "solidity": 0.14,
            },
        },
    }


def _measured_hover(info: GanttInfo, places: Sequence[int]) -> dict[str, Any]:
    return {
        "hovertext": [_hover(info.ops[place]) for place in places],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _nth(turn: int) -> str:
    return ("first", "second", "third", "fourth")[turn] if turn < 4 else f"{turn + 1}th"


def _hover(bar: GanttOp) -> str:
    name = OP_NAMES.get(bar.op, bar.op)
    return (
        f"<b>{name}</b> of micro-batch {bar.microbatch}, {seconds_text(bar.duration_ms / 1e3)}"
        f"<br>stage {bar.stage}, rank {bar.rank}"
    )


def gantt(trace: Trace, *, last_step: int | None = None) -> go.Figure:
    """Draw the operations of each pipeline rank in one step: the newest, up to `last_step` if given."""
    return draw_gantt(gantt_info(trace, last_step=last_step))
