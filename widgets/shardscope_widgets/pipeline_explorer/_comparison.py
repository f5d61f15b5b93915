"""All schedules side by side for one pipeline, by the closed forms that the planner uses, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardscope.analytic.schedules import closed
from shardscope.errors import SpecError
from shardscope.spec.pipeline_schedule import PipelineSchedule, schedules
from shardscope_widgets.words import safe, seconds_text, three_digits

HEADERS = ("Schedule", "Stages a rank", "Step", "Bubble", "Activations", "of 1F1B's")


class Row(NamedTuple):
    """One schedule: seconds of a step, the bubble's part of it, and micro-batches held by the fullest rank."""

    name: str
    virtual_stages: int
    step_s: float
    bubble: float
    held: float
    held_vs_1f1b: float
    problem: str = ""
    """Why there is no such schedule; the figures are then 0."""


def comparison_info(
    stages: int, microbatches: int, *, virtual_stages: int, t_f: float, t_input: float, t_weight: float
) -> tuple[Row, ...]:
    """A row for each schedule; stages of equal cost, sending free, all ranks meeting between steps.

    Args:
        stages: Ranks.
        microbatches: Of a step.
        virtual_stages: Stages a rank, for the schedules that leave the choice.
        t_f: Seconds of a micro-batch's forward pass on a whole rank.
        t_input: Of its backward pass for inputs.
        t_weight: Of its backward pass for weights.
    """
    work = microbatches * (t_f + t_input + t_weight)
    rows = []
    for index, schedule in enumerate(schedules()):
        name, held = schedule.name, schedule.stages_of(virtual_stages)
        if not schedule.accepts(microbatches, stages):
            rows.append(Row(name, held, 0, 0, 0, 0, f"needs {schedule.needs(stages)} micro-batches"))
            continue
        try:
            bubble = float(
                closed.bubble_time(index, stages, microbatches, held, t_f, t_input, t_weight, ranks_meet=True)
            )
            peak = float(closed.in_flight(index, np.arange(stages), stages, microbatches, held).max())
        except SpecError as error:
            rows.append(Row(name, held, 0, 0, 0, 0, str(error)))
            continue
        step = work + bubble
        rows.append(
            Row(name, held, step, bubble / step if step else 0.0, peak, peak / min(stages, microbatches))
        )
    return tuple(rows)


def comparison_html(rows: Sequence[Row], selected: str) -> str:
    """The rows as a table, the selected one marked."""
    best = min((row.step_s for row in rows if not row.problem), default=0.0)
    head = "".join(f'<th scope="col">{safe(name)}</th>' for name in HEADERS)
    body = "".join(_row_html(row, is_selected=row.name == selected, best=best) for row in rows)
    table = (
        f'<table class="ss-table ss-schedules"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    )
    return f'<div style="overflow-x:auto">{table}</div>'


def _row_html(row: Row, *, is_selected: bool, best: float) -> str:
    schedule = PipelineSchedule(row.name)
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
    """A bar as long as the part, for the eye; the number stands beside it."""
    return f'<i class="ss-meter" aria-hidden="true"><i style="width:{min(1.0, max(0.0, part)):.0%}"></i></i>'
