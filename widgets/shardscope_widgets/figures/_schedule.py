"""The predicted schedule of a pipeline: every operation, the activations held by each rank, and the idle ranks.

The bars look like those of the measured chart (`_pipeline`), so that the two can be compared. Below them, on the same
time axis, are the activations that each rank holds and the number of idle ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.analytic.schedules import Timeline
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._pipeline import OP_NAMES, ROW_PX, GanttInfo, GanttOp, bars, rank_axis
from shardscope_widgets.words import duration_text, plural, three_digits

HELD_PX, WAITING_PX = 132, 74
GAP_PX, TOP_PX, BOTTOM_PX, _KEY_PX = 40, 62, 46, 20
MOST_NUMBERED = 900
"""Maximum number of operations for which bars show their micro-batch; with more operations, bars are too narrow."""
RANK_COLOURS = (
    "#2a86d1", "#e06c2c", "#11997a", "#b866a6", "#c49a0c", "#5f6fd6", "#4fb3bf", "#a35a3a",
)  # fmt: skip
_SAMPLES = dict(zip(theme.DASHES, ("━━", "╺╸╺╸", "┅┅", "━╸╺", "━╸━╸", "━╸╺╸"), strict=True))
"""Text samples of lines, by dash style."""


class StepFunction(NamedTuple):
    """A piecewise-constant function of time: ``value[i]`` applies from ``at_ms[i]`` milliseconds on."""

    at_ms: tuple[float, ...]
    value: tuple[float, ...]


class ScheduleInfo(NamedTuple):
    """Operations, activations held and idle ranks of a predicted schedule.

    `held` and `peak` are the activations held by each rank, in micro-batches. `idle_ms` is the idle time of each rank
    and `waiting` the number of idle ranks over time.
    """

    gantt: GanttInfo
    waits: tuple[tuple[str, float], ...]
    """For each operation: text with stage, rank and dependency, and the idle time of its rank before it, in ms."""
    held: tuple[StepFunction, ...]
    peak: tuple[float, ...]
    idle_ms: tuple[float, ...]
    waiting: StepFunction


def schedule_info(timeline: Timeline, *, schedule: str, freed_by_input: float = 0.0) -> ScheduleInfo:
    """Return the operations, activations held and idle ranks of a predicted schedule.

    Args:
        timeline: A timeline from `analytic.schedules`, with times in milliseconds.
        schedule: Name of the schedule.
        freed_by_input: Fraction of the activations that a separate backward pass for inputs frees.
    """
    table = timeline.table
    held = table.held(freed_by_input=freed_by_input)
    return ScheduleInfo(
        GanttInfo(
            "predicted", schedule, 0, tuple(f"rank {rank}" for rank in range(len(table.ranks))), table.num_stages,
            1 + max(op.microbatch for op in table.ranks[0]), _bars(timeline), timeline.end,
            timeline.bubble_fraction, None,
        ),
        _waits(timeline),
        tuple(_held_line(timeline, steps) for steps in held),
        tuple(max(value for _, value in steps) for steps in held),
        _idle(timeline),
        _waiting(timeline),
    )  # fmt: skip


def _bars(timeline: Timeline) -> tuple[GanttOp, ...]:
    table, ranks = timeline.table, timeline.table.stage_ranks
    turns = [ranks[:stage].count(rank) for stage, rank in enumerate(ranks)]
    return tuple(
        GanttOp(ranks[stage], kind, stage, turns[stage], batch, start, end - start)
        for (kind, stage, batch), start, end in zip(table.ops, timeline.starts, timeline.ends, strict=True)
    )


def _idle(timeline: Timeline) -> tuple[float, ...]:
    """Return the idle time of each rank in the step, including before its first operation and after its last, in ms."""
    busy = [0.0] * len(timeline.table.ranks)
    for bar in _bars(timeline):
        busy[bar.rank] += bar.duration_ms
    return tuple(round(timeline.end - each, 9) for each in busy)


def _waits(timeline: Timeline) -> tuple[tuple[str, float], ...]:
    """Return the dependency of each operation as text, and the idle time of its rank before it, in milliseconds."""
    table, ends = timeline.table, [*timeline.ends, 0.0]
    needs = {
        (kind, stage): _need(timeline, kind, stage) for kind in "FBIW" for stage in range(table.num_stages)
    }
    waited = [start - ends[before] for start, before in zip(timeline.starts, table.order.before, strict=True)]
    return tuple((needs[op[:2]], wait) for op, wait in zip(table.ops, waited, strict=True))


def _need(timeline: Timeline, kind: str, stage: int) -> str:
    """Return text with the stage and rank of an operation and the result that it depends on."""
    ranks, last = timeline.table.stage_ranks, timeline.table.num_stages - 1
    here = f"stage {stage}, rank {ranks[stage]}<br>"
    if kind == "F":
        return here + ("needs only the input batch" if stage == 0 else _from("output", stage - 1, ranks))
    if kind == "W":
        return f"{here}needs this stage's backward for inputs"
    if stage == last:
        return f"{here}needs this stage's forward, which ends in the loss"
    return here + _from("gradient", stage + 1, ranks)


def _from(what: str, stage: int, ranks: Sequence[int]) -> str:
    return f"needs the {what} of stage {stage} (rank {ranks[stage]})"


def _held_line(timeline: Timeline, steps: Sequence[tuple[int, float]]) -> StepFunction:
    """Return the activations that a rank holds over time, in micro-batches, with a point at each change."""
    at, value = [0.0], [0.0]
    for place, held in steps:
        if held != value[-1]:
            at.append(round(timeline.starts[place], 3))
            value.append(round(held, 4))
    last = steps[-1][0] if steps else 0
    return StepFunction((*at, round(timeline.ends[last], 3)), (*value, 0.0))


def _waiting(timeline: Timeline) -> StepFunction:
    """Return the number of idle ranks over time."""
    changes: dict[float, int] = {}
    for first, last in timeline.bounds:
        free_from = 0.0
        for start, end in zip(timeline.starts[first:last], timeline.ends[first:last], strict=True):
            if start > free_from + 1e-9:
                changes[free_from] = changes.get(free_from, 0) + 1
                changes[start] = changes.get(start, 0) - 1
            free_from = end
        if free_from < timeline.end:
            changes[free_from] = changes.get(free_from, 0) + 1
    at, count = [0.0], [changes.pop(0.0, 0)]
    for time in sorted(changes):
        at.append(time)
        count.append(count[-1] + changes[time])
    return StepFunction((*(round(time, 3) for time in at), round(timeline.end, 3)), (*count, count[-1]))


def schedule_text(info: ScheduleInfo) -> str:
    """Return sentences on the predicted step time, the idle time and the activations held."""
    gantt = info.gantt
    parts = "1 micro-batch" if gantt.num_micro_batches == 1 else f"{gantt.num_micro_batches} micro-batches"
    peak = three_digits(max(info.peak))
    return (
        f"{PipelineSchedule(gantt.schedule).heading()}: {parts} through {plural(gantt.num_stages, 'stage')} on "
        f"{plural(len(gantt.ranks), 'rank')} take {duration_text(gantt.end_ms / 1e3)}. Ranks are idle for "
        f"{gantt.bubble:.1%} of this time, including before their first operation and after their last. A rank holds "
        f"the activations of at most {peak} micro-batches."
    )


def schedule_title(info: ScheduleInfo) -> str:
    """Return the chart's title, short enough for narrow charts: schedule, step time and bubble."""
    gantt = info.gantt
    return (
        f"<b>{PipelineSchedule(gantt.schedule).heading()}</b>: {duration_text(gantt.end_ms / 1e3)}, "
        f"bubble {gantt.bubble:.1%}"
    )


def schedule_json(info: ScheduleInfo) -> dict[str, Any]:
    """Return the figure as Plotly JSON, without validation, so that it redraws smoothly while a slider moves."""
    numbered = len(info.gantt.ops) <= MOST_NUMBERED
    data = bars(info.gantt, lambda places: _told(info, places), with_text=numbered)
    if not numbered:
        for trace in data:
            trace["marker"]["line"]["width"] = 0
    data += [_held_trace(rank, line, info) for rank, line in enumerate(info.held)]
    data.append(_waiting_trace(info))
    return {"data": data, "layout": _layout(info)}


def schedule(timeline: Timeline, *, schedule: str, freed_by_input: float = 0.0) -> go.Figure:
    """Draw the predicted operations of each rank in one step; arguments as for `schedule_info`.

    Example:
        >>> from shardscope.analytic import schedules
        >>> table = schedules.build("zbv", stages=4, microbatches=8)
        >>> schedule(table.timeline({"F": 5, "I": 5, "W": 5}), schedule="zbv")  # doctest: +SKIP
    """
    return go.Figure(schedule_json(schedule_info(timeline, schedule=schedule, freed_by_input=freed_by_input)))


def _told(info: ScheduleInfo, places: Sequence[int]) -> dict[str, Any]:
    first = info.gantt.ops[places[0]]
    name = OP_NAMES[first.op]
    return {
        "name": name if first.turn == 0 else "fainter: later stages of the rank",
        "legendrank": 1000 + first.turn,
        "showlegend": first.turn == 0 or (first.turn == 1 and first.op == "F"),
        "hovertext": [info.waits[place][0] for place in places],
        "customdata": [info.waits[place][1] for place in places],
        "hovertemplate": f"<b>{name}</b> of micro-batch %{{text}}, %{{base:.2~f}} to %{{x:.2~f}} ms<br>"
        "%{hovertext}<br>rank idle before it: %{customdata:.2~f} ms<extra></extra>",
    }


def _held_trace(rank: int, line: StepFunction, info: ScheduleInfo) -> dict[str, Any]:
    colour, dash = _line_look(rank)
    return {
        "type": "scatter", "mode": "lines", "x": line.at_ms, "y": line.value, "yaxis": "y2", "showlegend": False,
        "line": {"shape": "hv", "width": 1.8, "color": colour, "dash": dash},
        "name": f"rank {rank}", "hovertemplate": f"rank {rank}: activations of %{{y}} micro-batches, at most "
        f"{three_digits(info.peak[rank])}<extra></extra>",
    }  # fmt: skip


def _line_look(rank: int) -> tuple[str, str]:
    return RANK_COLOURS[rank % len(RANK_COLOURS)], theme.DASHES[rank % len(theme.DASHES)]


def _named(rank: int, name: str) -> str:
    """Return a rank's name with a sample of its line, because the chart has no legend for lines."""
    colour, dash = _line_look(rank)
    return f"{name} <span style='color:{colour}'>{_SAMPLES[dash]}</span> "


def _waiting_trace(info: ScheduleInfo) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "x": info.waiting.at_ms, "y": info.waiting.value, "yaxis": "y3",
        "line": {"shape": "hv", "width": 1, "color": theme.GREY}, "fill": "tozeroy", "fillcolor": theme.IDLE.colour,
        "showlegend": False, "hovertemplate": "%{y} ranks idle<extra></extra>",
    }  # fmt: skip


def _layout(info: ScheduleInfo) -> dict[str, Any]:
    ranks = info.gantt.ranks
    chart_px = ROW_PX * len(ranks) if len(ranks) <= 8 else 24 * len(ranks) + 176
    keys = len({op.op for op in info.gantt.ops}) + (info.gantt.num_stages > len(ranks))
    top = TOP_PX + _KEY_PX * max(0, keys - 2)  # in a narrow chart, each entry of the legend has a line
    inner = chart_px + HELD_PX + WAITING_PX + 2 * GAP_PX
    bottom_chart, top_held = 1 - chart_px / inner, 1 - (chart_px + GAP_PX) / inner
    bottom_held = top_held - HELD_PX / inner
    shared: dict[str, Any] = {"rangemode": "tozero", "fixedrange": True}
    layout: dict[str, Any] = {
        "xaxis": theme.axis("milliseconds", range=[0, info.gantt.end_ms * 1.005 or 1], anchor="y3"),
        "yaxis": rank_axis(ranks)
        | {"domain": [bottom_chart, 1], "ticktext": [_named(*each) for each in enumerate(ranks)]},
        "yaxis2": theme.axis(domain=[bottom_held, top_held], nticks=5, **shared),
        "yaxis3": theme.axis(domain=[0, WAITING_PX / inner], range=[0, len(ranks)], nticks=4, **shared),
        "annotations": [
            theme.note(schedule_title(info), x=0, y=1) | {"yshift": 4},
            theme.note("Activations held by each rank, in micro-batches", x=0, y=top_held) | {"yshift": 2},
            theme.note("Idle ranks", x=0, y=WAITING_PX / inner) | {"yshift": 2},
            *_margin_notes(info),
        ],
        "barmode": "overlay",
        "margin": {"l": 8, "r": 128, "t": top, "b": BOTTOM_PX},
        "legend": theme.LEGEND_ABOVE,
    }
    if len(info.gantt.ops) <= MOST_NUMBERED:
        layout["uniformtext"] = {"minsize": 9, "mode": "hide"}
    return theme.look(height=inner + top + BOTTOM_PX, **layout)


def _margin_notes(info: ScheduleInfo) -> list[dict[str, Any]]:
    """Return notes to the right of each row: the fraction of time the rank is idle, and its peak activations."""
    return [
        {
            "text": f"idle {idle / info.gantt.end_ms if info.gantt.end_ms else 0:.0%}, holds {three_digits(peak)}",
            "x": 1.005, "xref": "paper", "xanchor": "left", "y": rank, "yref": "y", "yanchor": "middle",
            "showarrow": False, "font": {"size": 11, "color": theme.GREY},
        }
        for rank, (idle, peak) in enumerate(zip(info.idle_ms, info.peak, strict=True))
    ]  # fmt: skip
