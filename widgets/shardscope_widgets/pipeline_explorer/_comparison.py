"""A table that compares all schedules for one pipeline, by the closed forms that the planner uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from shardscope.analytic.schedules import closed
from shardscope.errors import SpecError
from shardscope.spec.pipeline_schedule import PipelineSchedule, schedules
from shardscope_widgets.words import safe, seconds_text, three_digits

HEADERS = ("Schedule", "Stages a rank", "Step", "Bubble", "Activations", "of 1F1B's")


class ScheduleRow(NamedTuple):
    """One schedule: seconds per step, the bubble as a fraction of it, and micro-batches held by the fullest rank."""

    name: str
    virtual_stages: int
    step_s: float
    bubble: float
    held: float
    held_vs_1f1b: float
    problem: str = ""
    """Why the schedule is impossible with these numbers; the figures are then 0."""


def comparison_info(
    stages: int, microbatches: int, *, virtual_stages: int, t_f: float, t_input: float, t_weight: float
) -> tuple[ScheduleRow, ...]:
    """Return a row for each schedule, for stages of equal cost, free sends and a barrier between steps.

    Args:
        stages: Number of ranks.
        microbatches: Micro-batches per step.
        virtual_stages: Stages per rank, for the schedules where it can be chosen.
        t_f: Seconds of a micro-batch's forward pass through all stages of a rank.
        t_input: Seconds of its backward pass for inputs.
        t_weight: Seconds of its backward pass for weights.
    """
    known = schedules()
    accepted = [index for index, schedule in enumerate(known) if schedule.accepts(microbatches, stages)]
    held = [schedule.stages_of(virtual_stages) for schedule in known]

    def figures(chosen: list[int]) -> list[tuple[float, float]]:
        """Return the bubble of each schedule in seconds, and the micro-batches that its fullest rank holds."""
        index, stages_held = np.array(chosen), np.array([held[each] for each in chosen])
        bubbles = closed.bubble_time(
            index, stages, microbatches, stages_held, t_f, t_input, t_weight, ranks_meet=True
        )
        ranks = np.arange(stages)
        peaks = closed.in_flight(index[:, None], ranks, stages, microbatches, stages_held[:, None])
        return list(zip(bubbles.tolist(), peaks.max(axis=1).tolist(), strict=True))

    found = _each_or_why(figures, accepted)
    work = microbatches * (t_f + t_input + t_weight)
    rows = []
    for index, schedule in enumerate(known):
        name, got = schedule.name, found.get(index)
        if isinstance(got, tuple):
            bubble, peak = got
            step = work + bubble
            part = bubble / step if step else 0.0
            rows.append(ScheduleRow(name, held[index], step, part, peak, peak / min(stages, microbatches)))
        else:
            problem = got or f"needs {schedule.needs(stages)} micro-batches"
            rows.append(ScheduleRow(name, held[index], 0, 0, 0, 0, problem))
    return tuple(rows)


def _each_or_why(
    figures: Callable[[list[int]], list[tuple[float, float]]], chosen: list[int]
) -> dict[int, tuple[float, float] | str]:
    """Return each schedule's figures, or the error message where they cannot be computed.

    All are computed in one call; if that fails, each is computed separately.
    """
    try:
        return dict(zip(chosen, figures(chosen), strict=True))
    except SpecError as error:
        if len(chosen) == 1:
            return {chosen[0]: str(error)}
        return {index: found for each in chosen for index, found in _each_or_why(figures, [each]).items()}


def comparison_html(rows: Sequence[ScheduleRow], selected: str) -> str:
    """The rows as a table, the selected one marked."""
    best = min((row.step_s for row in rows if not row.problem), default=0.0)
    head = "".join(f'<th scope="col">{safe(name)}</th>' for name in HEADERS)
    known = {schedule.name: schedule for schedule in schedules()}
    body = "".join(
        _row_html(row, known[row.name], is_selected=row.name == selected, best=best) for row in rows
    )
    table = (
        f'<table class="ss-table ss-schedules"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    )
    return f'<div style="overflow-x:auto">{table}</div>'


def _row_html(row: ScheduleRow, schedule: PipelineSchedule, *, is_selected: bool, best: float) -> str:
    mark = ' class="selected" aria-current="true"' if is_selected else ""
    title = f'<th scope="row" title="{safe(schedule.about())} {safe(schedule.source)}.">{safe(schedule.heading())}</th>'
    if row.problem:
        problem = f'<td colspan="4">{safe(row.problem)}</td>'
        return f"<tr{mark}>{title}<td>{row.virtual_stages}</td>{problem}</tr>"
    slower = (
        f"<small>+{row.step_s / best - 1:.0%}</small>"
        if row.step_s > best * 1.005
        else "<small>fastest</small>"
    )
    cells = (
        str(row.virtual_stages),
        f"{seconds_text(row.step_s)} {slower}",
        f"{_meter(row.bubble)}{row.bubble:.1%}",
        three_digits(row.held),
        f"{_meter(row.held_vs_1f1b / 2)}{row.held_vs_1f1b:.2f}",
    )
    return f"<tr{mark}>{title}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _meter(part: float) -> str:
    """A bar whose width is the fraction `part`, hidden from screen readers: the number stands next to it."""
    return f'<i class="ss-meter" aria-hidden="true"><i style="width:{min(1.0, max(0.0, part)):.0%}"></i></i>'
