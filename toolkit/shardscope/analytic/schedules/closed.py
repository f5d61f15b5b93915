"""Bubble and memory of every schedule as closed forms over arrays, to search millions of layouts.

A schedule is given by its index into `spec.pipeline_schedule.schedules`; arguments follow NumPy broadcasting. Times are
for one micro-batch on a whole rank, that is, through all stages of the rank, so they do not depend on the number of
virtual stages. Memory is in units of one micro-batch's activations on a whole rank. Sending takes no time here.

Accuracy against the counted tables (tests/analytic/test_schedules_closed.py):
    equal durations                 bubble and memory exact, every schedule, any number of micro-batches it accepts
    any durations                   bubble exact, except as follows
    zbv                             exact from 2p-1 micro-batches up, unless t_weight < t_input < t_f
    v-half and v-min                close from p micro-batches up (see `bubble_time`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.schedules import counted
from shardscope.analytic.schedules.paths import Case, Floats
from shardscope.spec import registry
from shardscope.spec.pipeline_schedule import HeldTerms, PipelineSchedule, schedules

Numbers = npt.ArrayLike
Flags = npt.NDArray[np.bool_]


class ScheduleColumns(NamedTuple):
    """Properties of schedules that searches look up, by index into `schedules`."""

    v_shaped: Flags
    leaves_stages: Flags
    """Whether the user chooses the number of stages per rank."""
    of_left: Floats
    of_all: Floats
    constant: Floats
    is_rounded: Flags
    in_thirds: Flags


def columns() -> ScheduleColumns:
    """Return the columns of all registered schedules, with the terms of `HeldTerms`, 0 if a schedule has none."""
    return _columns_of(registry.all_of(PipelineSchedule))


@lru_cache(maxsize=8)
def _columns_of(_known: tuple[type[PipelineSchedule], ...]) -> ScheduleColumns:
    """Build the columns; cached by the classes, so that a redefined class gives new columns."""
    known = schedules()
    terms = zip(*(each.held_terms or HeldTerms(0.0, 0.0) for each in known), strict=True)
    return ScheduleColumns(
        np.array([each.v_shaped for each in known]),
        np.array([each.most_stages is None for each in known]),
        *map(np.array, terms),
    )


def bubble_time(  # noqa: PLR0917
    schedule: Numbers,
    stages: Numbers,
    microbatches: Numbers,
    virtual_stages: Numbers,
    t_f: Numbers,
    t_input: Numbers,
    t_weight: Numbers,
    *,
    ranks_meet: bool = False,
) -> Floats:
    """Idle time in a step, in seconds, of the rank that waits longest, between its first and its last operation.

    Args:
        schedule: Index into `schedules`.
        stages: Number of ranks in the pipeline.
        microbatches: Number of micro-batches in a step.
        virtual_stages: Number of stages per rank; only the interleaved schedules use it.
        t_f: Seconds of one micro-batch's forward pass on a whole rank.
        t_input: Seconds of the backward pass for the input.
        t_weight: Seconds of the backward pass for the weights.
        ranks_meet: Whether all ranks synchronise between steps, as for clipping gradients by their norm. The
            zero-bubble papers avoid this by checking afterwards; with it, part of their bubble returns as a ramp.

    The step time is the work of a rank plus this bubble.

    The formulas and their sources are in `paths`. For `v-half` and `v-min` from p micro-batches up and with t_input
    0.7 to 2.6 and t_weight 0.4 to 1.4 times t_f, work and bubble together are within 2.5 % of the counted step, and
    mostly exact.

    Example:
        >>> from shardscope.spec.layout import schedule_names
        >>> float(bubble_time(schedule_names().index("zb-h1"), 4, 8, 1, 1.0, 1.0, 1.0))
        3.0
    """
    inputs = (stages, microbatches, virtual_stages, t_f, t_input, t_weight)

    def seconds(one: PipelineSchedule, rows: Sequence[Floats]) -> Floats:
        p, m, given, *durations = rows
        v = _held(one, given)
        case = Case(p, m, *(duration / v for duration in durations))
        bubble = one.bubble(case)
        if bubble is None:
            return counted.bubble(one, case, v, ranks_meet=ranks_meet)
        ramp = one.ramp(case) if ranks_meet else None
        return np.asarray(bubble if ramp is None else np.maximum(bubble, ramp))

    return _by_schedule(schedule, inputs, seconds)


def in_flight(
    schedule: Numbers, stage: Numbers, stages: Numbers, microbatches: Numbers, virtual_stages: Numbers
) -> Floats:
    """Peak activations that a rank holds, in units of one micro-batch's activations on a whole rank.

    Args:
        schedule: Index into `schedules`.
        stage: Place of the rank in the pipeline, from 0.
        stages: Number of ranks in the pipeline.
        microbatches: Number of micro-batches in a step.
        virtual_stages: Number of stages per rank; only the interleaved schedules use it.

    Exact for any number of micro-batches, except for `v-half` and `v-min` with fewer micro-batches than ranks, where it
    is an upper bound. The formula of each schedule is in its class.

    Example:
        >>> from shardscope.spec.layout import schedule_names
        >>> float(in_flight(schedule_names().index("1f1b"), 1, 4, 8, 1))
        3.0
    """

    def held(one: PipelineSchedule, rows: Sequence[Floats]) -> Floats:
        rank, p, m, given = rows
        v = _held(one, given)
        found = one.in_flight(rank, p, m, v)
        return counted.in_flight(one, rank, p, m, v) if found is None else np.asarray(found)

    return _by_schedule(schedule, (stage, stages, microbatches, virtual_stages), held)


def _held(schedule: PipelineSchedule, given: Floats) -> Floats | float:
    """Number of stages per rank: the given number if the schedule allows a choice, else the schedule's own."""
    return given if schedule.most_stages is None else float(schedule.default_stages)


def _by_schedule(
    schedule: Numbers,
    inputs: Sequence[Numbers],
    formula: Callable[[PipelineSchedule, Sequence[Floats]], Floats],
) -> Floats:
    """Apply each schedule's formula to the rows with that schedule."""
    index = np.asarray(schedule)
    shape = np.broadcast_shapes(index.shape, *(np.shape(column) for column in inputs))
    if index.ndim == 0:
        values = formula(schedules()[int(index)], [np.asarray(column, dtype=np.float64) for column in inputs])
        return np.array(np.broadcast_to(values, shape))
    flat = np.broadcast_to(index, shape).ravel().astype(np.int8)
    order = np.argsort(flat, kind="stable")
    columns = [_sorted(column, shape, order) for column in inputs]
    out = np.empty(flat.size)
    for one, rows in _runs(flat[order]):
        out[order[rows]] = formula(one, [column[rows] if column.ndim else column for column in columns])
    return out.reshape(shape)


def _sorted(column: Numbers, shape: tuple[int, ...], order: npt.NDArray[np.intp]) -> Floats:
    """Sort a column by schedule; a single number stays a single number."""
    values = np.asarray(column, dtype=np.float64)
    return values if values.ndim == 0 else np.broadcast_to(values, shape).ravel()[order]


def _runs(index: npt.NDArray[np.int8]) -> Iterator[tuple[PipelineSchedule, slice]]:
    """Yield every schedule that occurs, and its slice of the sorted rows."""
    known = schedules()
    ends = np.searchsorted(index, np.arange(len(known) + 1))
    for one, first, last in zip(known, ends, ends[1:], strict=False):
        if last > first:
            yield one, slice(first, last)
