"""The measured schedule of a pipeline: one row per rank, one bar for each pass of each micro-batch.

Waiting is the mean over ranks of the fraction of time, between the first and last operation of a step, in which a rank
runs no operation (`shardscope.measure.pipeline_waits`). It is shown next to the bubble, which is the waiting in the
schedule's table with stages of equal cost. For GPipe and 1F1B, the bubble is (p - 1) / (m + p - 1) with p stages and m
micro-batches per pass (Huang et al., GPipe, NeurIPS 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.analytic.schedules import build
from shardscope.analytic.schedules.table import ScheduleTable
from shardscope.errors import SpecError
from shardscope.measure.pipeline_waits import PassTimes, pass_times, typical
from shardscope.spec import registry
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._ghosts import Ghost
from shardscope_widgets.trace import Trace, TraceOp
from shardscope_widgets.words import duration_text, plural, safe

OP_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}
ROW_PX = 46


class GanttOp(NamedTuple):
    """One operation.

    Times are in milliseconds from the start of the step's first operation. `turn` is the index of the stage among the
    stages of its rank.
    """

    rank: int
    op: str
    stage: int
    turn: int
    microbatch: int
    start_ms: float
    duration_ms: float


class GanttInfo(NamedTuple):
    """One step: its operations, duration and measured waiting, and the bubble from the schedule's table (`ideal`).

    `usual` are the medians over the run's steps; None if only one step is known. `predicted` are the operations of the
    predicted step, which are drawn fainter below the measured operations.
    """

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
    predicted: tuple[GanttOp, ...] = ()
    usual: PassTimes | None = None


def complete_schedule_steps(trace: Trace) -> list[int]:
    """Return the steps whose schedule every rank has reported, in order."""
    return sorted(n for n, ops in trace.ops.items() if len({op.rank for op in ops}) == trace.world_size)


def gantt_info(trace: Trace, *, last_step: int | None = None, ghost: Ghost | None = None) -> GanttInfo:
    """Return the data of the newest step whose schedule every rank has reported.

    Args:
        trace: The run.
        last_step: Newest step to return; None for no limit.
        ghost: Predicted values of the run; None if there are none.
    """
    known = [step for step in complete_schedule_steps(trace) if last_step is None or step <= last_step]
    ranks = tuple(trace.name_of(rank) for rank in range(trace.world_size))
    if not known:
        return GanttInfo(trace.label, trace.schedule, 0, ranks, 0, 0, (), 0.0, 0.0, None)
    ops = sorted(trace.ops[known[-1]], key=lambda op: (op.start, op.rank))
    zero = ops[0].start
    end_ms = (max(op.end for op in ops) - zero) * 1e3
    stages = max(op.stage for op in ops) + 1
    parts = max(op.microbatch for op in ops) + 1
    turns = _turns(ops)
    return GanttInfo(
        trace.label, trace.schedule, known[-1], ranks, stages, parts, tuple(_bar(op, zero, turns) for op in ops),
        round(end_ms, 4), _times(trace, known[-1]).waiting, _ideal(trace, stages, parts // trace.passes),
        _predicted(trace, stages, parts, ghost), _usual(trace),
    )  # fmt: skip


def _times(trace: Trace, step: int) -> PassTimes:
    if step not in trace.pass_times:
        passes = [(op.start, op.end) for op in trace.ops[step]]
        trace.pass_times[step] = pass_times(passes, trace.world_size)
    return trace.pass_times[step]


def _usual(trace: Trace) -> PassTimes | None:
    known = complete_schedule_steps(trace)
    return typical({step: _times(trace, step) for step in known}) if len(known) > 1 else None


def _table(trace: Trace, stages: int, microbatches: int) -> ScheduleTable | None:
    """Return the schedule's table; None if the schedule is unknown or has no table."""
    if trace.order is None and registry.find(PipelineSchedule, trace.schedule) is None:
        return None
    try:
        return build(
            trace.order or trace.schedule, trace.world_size, microbatches, stages // trace.world_size
        )
    except SpecError:  # a user's schedule that has since been redefined
        return None


def _ideal(trace: Trace, stages: int, microbatches: int) -> float | None:
    table = _table(trace, stages, microbatches)
    return None if table is None else table.bubble_fraction


def _predicted(trace: Trace, stages: int, parts: int, ghost: Ghost | None) -> tuple[GanttOp, ...]:
    """Return the operations of the predicted step: the schedule's table with the predicted times of the passes."""
    table = None if ghost is None else _table(trace, stages, parts // trace.passes)
    if table is None or ghost is None:
        return ()
    passes = {part.part: part.seconds * 1e3 / (parts * stages // trace.world_size) for part in ghost.parts}
    forward, backward = passes.get("forward", 0.0), passes.get("backward", 0.0)
    if not forward or not backward:
        return ()
    timeline = table.timeline({"F": forward, "B": backward, "I": backward / 2, "W": backward / 2})
    each, ops = parts // trace.passes, zip(table.ops, timeline.starts, timeline.ends, strict=True)
    return tuple(
        GanttOp(table.stage_ranks[op.stage], op.op, op.stage, 0, op.microbatch + turn * each,
                round(start + turn * timeline.end, 4), round(end - start, 4))
        for op, start, end in ops
        for turn in range(trace.passes)
    )  # fmt: skip


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
    """Return sentences on the micro-batches and stages, and on the waiting in the step and in all steps."""
    if not info.ops:
        return "No schedule is recorded yet; it appears after the first step of a pipeline."
    parts = "1 micro-batch" if info.num_micro_batches == 1 else f"{info.num_micro_batches} micro-batches"
    verb = "takes" if info.num_micro_batches == 1 else "take"
    usual = (
        ""
        if info.usual is None
        else f" (medians over all steps: {duration_text(info.usual.seconds)}, {info.usual.waiting:.0%})"
    )
    alone = (
        ""
        if info.ideal is None
        else f" The bubble would be {info.ideal:.0%} with stages of equal cost and backward passes twice as long as "
        "forward passes."
    )
    return (
        f"{info.label}, step {info.step}: {parts} through {plural(info.num_stages, 'stage')} on "
        f"{plural(len(info.ranks), 'rank')} {verb} {duration_text(info.end_ms / 1e3)}. Ranks wait for "
        f"{info.bubble:.0%} of this time{usual}.{alone}{_gap(info)}"
    )


def _gap(info: GanttInfo) -> str:
    """Return a sentence on the operation type whose predicted and measured time differ most; empty if unpredicted."""
    if not info.predicted:
        return ""
    gaps = {
        op: (_mean_ms(info.predicted, op), _mean_ms(info.ops, op))
        for op in {each.op for each in info.ops} & {each.op for each in info.predicted}
    }
    op = max(gaps, key=lambda op: abs(gaps[op][0] - gaps[op][1]))
    predicted, measured = (duration_text(value / 1e3) for value in gaps[op])
    name = OP_NAMES.get(op, op)
    return f" Fainter: predicted. Largest difference: a {name} pass, {predicted} predicted and {measured} measured."


def _mean_ms(ops: Sequence[GanttOp], op: str) -> float:
    return fmean(each.duration_ms for each in ops if each.op == op)


def gantt_heading(info: GanttInfo) -> dict[str, Any]:
    """Return the chart's heading, in two lines for narrow charts: schedule; step, waiting (median first), bubble."""
    ideal = "" if info.ideal is None else f", bubble {info.ideal:.0%}"
    own = (
        f"{info.bubble:.0%}"
        if info.usual is None
        else f"{info.usual.waiting:.0%} (this step {info.bubble:.0%})"
    )
    return theme.heading(safe(info.schedule or "pipeline"), f"step {info.step}: waiting {own}{ideal}", x=0)


def draw_gantt(info: GanttInfo) -> go.Figure:
    """Draw one row per rank, with one bar per operation."""
    figure = go.Figure(bars(info, lambda places: _measured_hover(info, places)))
    figure.add_traces(_ghosts(info))
    end_ms = max([info.end_ms, *(op.start_ms + op.duration_ms for op in info.predicted)])
    figure.update_layout(
        xaxis=theme.axis("milliseconds", range=[0, end_ms * 1.005 or 1]),
        yaxis=rank_axis(info.ranks),
        annotations=[gantt_heading(info)] if info.ops else [],
        uniformtext={"minsize": 9, "mode": "hide"},
    )
    return theme.style(figure, height=132 + ROW_PX * len(info.ranks), barmode="overlay", head=78)


def _ghosts(info: GanttInfo) -> list[dict[str, Any]]:
    """Return thin, fainter bars for the predicted operations, below the measured bars of each rank."""
    ghost = info._replace(ops=info.predicted, predicted=())
    shown = bars(ghost, lambda places: _measured_hover(ghost, places), with_text=False)
    for bar in shown:
        bar |= {"y": [rank + 0.47 for rank in bar["y"]], "width": 0.12, "opacity": 0.5, "showlegend": False}
        bar |= {"name": f"predicted {bar['name']}", "text": None}
        bar["hovertext"] = [f"{text}<br>predicted" for text in bar["hovertext"]]
    return [*shown, theme.ghost_key()] if shown else []


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
        "marker": theme.striped(look, white=0.5, fillmode="overlay", size=7, solidity=0.14)
        | {"color": colour, "line": {"width": 0.6, "color": "rgba(255,255,255,0.75)"}},
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
        f"<b>{name}</b> of micro-batch {bar.microbatch}, {duration_text(bar.duration_ms / 1e3)}"
        f"<br>stage {bar.stage}, rank {bar.rank}"
    )


def gantt(trace: Trace, *, last_step: int | None = None) -> go.Figure:
    """Draw the operations of each pipeline rank in one step: the newest, up to `last_step` if given."""
    return draw_gantt(gantt_info(trace, last_step=last_step))
