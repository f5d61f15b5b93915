"""A table that compares all schedules for one pipeline, from the closed-form formulas that the planner uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from shardscope.analytic.schedules import closed
from shardscope.errors import SpecError
from shardscope.show import Cell, Table
from shardscope.spec.pipeline_schedule import PipelineSchedule, schedules
from shardscope_widgets.words import duration_text, three_digits

HEADERS = ("Schedule", "Stages per rank", "Step time", "Bubble", "Micro-batches held", "vs 1F1B")


class ScheduleRow(NamedTuple):
    """Results of one schedule.

    `step_s` is the step time in seconds, and `bubble` the fraction of this time in which ranks are idle. `held` is the
    peak number of micro-batches whose activations one rank holds, and `held_vs_1f1b` is its ratio to the number for
    1F1B.
    """

    name: str
    virtual_stages: int
    step_s: float
    bubble: float
    held: float
    held_vs_1f1b: float
    problem: str = ""
    """Why the schedule cannot be used with these inputs (its values are then 0); empty if it can be used."""


def comparison_info(
    stages: int, microbatches: int, *, virtual_stages: int, t_f: float, t_input: float, t_weight: float
) -> tuple[ScheduleRow, ...]:
    """Return a row for each schedule, assuming stages of equal cost, free communication and a barrier between steps.

    Args:
        stages: Number of ranks.
        microbatches: Micro-batches per step.
        virtual_stages: Stages per rank, for schedules that let the user choose this number.
        t_f: Time of the forward pass of one micro-batch through all stages of a rank, in seconds.
        t_input: Time of the backward pass for inputs of one micro-batch, in seconds.
        t_weight: Time of the backward pass for weights of one micro-batch, in seconds.
    """
    known = schedules()
    accepted = [index for index, schedule in enumerate(known) if schedule.accepts(microbatches, stages)]
    held = [schedule.stages_of(virtual_stages) for schedule in known]

    def figures(chosen: list[int]) -> list[tuple[float, float]]:
        """Return each schedule's bubble in seconds, and its peak number of micro-batches in flight on a rank."""
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
    """Return the values of `figures` by schedule index, or the error message where they cannot be computed.

    All schedules are computed in one call; if that fails, each schedule is computed separately.
    """
    try:
        return dict(zip(chosen, figures(chosen), strict=True))
    except SpecError as error:
        if len(chosen) == 1:
            return {chosen[0]: str(error)}
        return {index: found for each in chosen for index, found in _each_or_why(figures, [each]).items()}


def comparison_html(rows: Sequence[ScheduleRow], selected: str) -> str:
    """Return the rows as an HTML table, with the selected schedule marked."""
    best = min((row.step_s for row in rows if not row.problem), default=0.0)
    known = {schedule.name: schedule for schedule in schedules()}
    cells = [_cells(row, known[row.name], best) for row in rows]
    mark = ' class="selected" aria-current="true"'
    chosen = {at: mark for at, row in enumerate(rows) if row.name == selected}
    return Table(HEADERS, cells, has_row_heads=True).html("ss-table ss-schedules", chosen)


def _cells(row: ScheduleRow, schedule: PipelineSchedule, best: float) -> list[str | Cell]:
    head = Cell(schedule.heading(), about=f"{schedule.about()} {schedule.source}.")
    if row.problem:
        return [head, str(row.virtual_stages), Cell(row.problem, span=4)]
    slower = f"+{row.step_s / best - 1:.0%}" if row.step_s > best * 1.005 else "fastest"
    return [
        head,
        str(row.virtual_stages),
        Cell("", mark=f"{duration_text(row.step_s)} <small>{slower}</small>"),
        _metered(row.bubble, f"{row.bubble:.1%}"),
        three_digits(row.held),
        _metered(row.held_vs_1f1b / 2, f"{row.held_vs_1f1b:.2f}"),
    ]


def _metered(part: float, number: str) -> Cell:
    """Return a bar filled to the fraction `part`, hidden from screen readers, and the number beside it."""
    filled = f'<i style="width:{min(1.0, max(0.0, part)):.0%}"></i>'
    return Cell("", mark=f'<i class="ss-meter" aria-hidden="true">{filled}</i><span>{number}</span>')
