"""Bubble and activation memory of every pipeline schedule as formulas over arrays, to search millions of layouts.

A schedule is given as an index into `spec.pipeline_schedule.schedules`, and arguments are broadcast against each other.
Durations are those of one micro-batch on all stages of a rank, so they do not depend on the number of virtual stages.
Memory is in units of the activations of one micro-batch on all stages of a rank. Sending is assumed to take no time.

The formulas agree with values computed from the schedules' tables (tests/analytic/test_schedules_closed.py) as follows,
on p ranks::

    equal durations         bubble and memory are exact for every schedule and every valid number of micro-batches
    other durations         the bubble is exact, except for these schedules:
      zbv                   exact from 2p-1 micro-batches up, unless t_weight < t_input < t_f
      v-half and v-min      approximate from p micro-batches up (see `bubble_time`)
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
    """Properties of all schedules, as arrays by index into `schedules`; the last five fields are from `HeldTerms`."""

    v_shaped: Flags
    splits: Flags
    """Whether the backward pass is split into input and weight gradients."""
    leaves_stages: Flags
    """Whether the user can choose the number of stages per rank."""
    of_left: Floats
    of_all: Floats
    constant: Floats
    is_rounded: Flags
    in_thirds: Flags


def columns() -> ScheduleColumns:
    """Return the properties of all registered schedules; coefficients are 0 for schedules without `HeldTerms`."""
    return _columns_of(registry.all_of(PipelineSchedule))


@lru_cache(maxsize=8)
def _columns_of(_known: tuple[type[PipelineSchedule], ...]) -> ScheduleColumns:
    """Return the columns; the cache is keyed by the schedule classes, so that a redefined class is not ignored."""
    known = schedules()
    terms = zip(*(each.held_terms or HeldTerms(0.0, 0.0) for each in known), strict=True)
    return ScheduleColumns(
        np.array([each.v_shaped for each in known]),
        np.array([each.splits_backward for each in known]),
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
    """Return the bubble in seconds: the idle time per step of the rank that is idle longest.

    Idle time counts from a rank's first operation to its last, so the step time is the work of a rank plus the bubble.

    The formulas and their sources are in the module `paths`. For `v-half` and `v-min` on p ranks, the step time (work
    and bubble) is within 3 % of the time computed from the table, and mostly exact, if there are at least p
    micro-batches, t_input is 0.7 to 2.6 times t_f, and t_weight is 0.4 to 1.4 times t_f.

    Args:
        schedule: Index into `schedules`.
        stages: Number of ranks in the pipeline.
        microbatches: Number of micro-batches in a step.
        virtual_stages: Number of stages per rank; only the interleaved schedules use it.
        t_f: Seconds of the forward pass of one micro-batch on all stages of a rank.
        t_input: Seconds of the backward pass that computes the input gradients.
        t_weight: Seconds of the backward pass that computes the weight gradients.
        ranks_meet: Whether all ranks synchronise between steps, as for clipping gradients by their norm. The
            zero-bubble papers avoid this by validating the update afterwards. With synchronisation, waits before a
            rank's first operation and after its last count as idle too.

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
    """Return the peak activations that a rank holds, in units of one micro-batch's activations on all its stages.

    The result is exact for any number of micro-batches, except for `v-half` and `v-min` with fewer micro-batches than
    ranks, where it is an upper bound. The formula of each schedule is in the schedule's class.

    Args:
        schedule: Index into `schedules`.
        stage: Position of the rank in the pipeline, from 0.
        stages: Number of ranks in the pipeline.
        microbatches: Number of micro-batches in a step.
        virtual_stages: Number of stages per rank; only the interleaved schedules use it.

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
    """Return the number of stages per rank: `given` if the schedule allows a choice, else its fixed number."""
    return given if schedule.most_stages is None else float(schedule.default_stages)


def _by_schedule(
    schedule: Numbers,
    inputs: Sequence[Numbers],
    formula: Callable[[PipelineSchedule, Sequence[Floats]], Floats],
) -> Floats:
    """Apply `formula` to the rows of each schedule, and return the results in the order of the rows."""
    index = np.asarray(schedule)
    shape = np.broadcast_shapes(index.shape, *(np.shape(column) for column in inputs))
    if index.ndim == 0:
        values = formula(schedules()[int(index)], [np.asarray(column, dtype=np.float64) for column in inputs])
        return np.array(np.broadcast_to(values, shape))
    flat = np.broadcast_to(index, shape).ravel().astype(np.int8)
    order = np.argsort(flat, kind="stable")
    columns = [_sorted(column, shape, order) for column in inputs]
    out = np.empty(flat.size)
    for one, rows in _schedule_slices(flat[order]):
        out[order[rows]] = formula(one, [column[rows] if column.ndim else column for column in columns])
    return out.reshape(shape)


def _sorted(column: Numbers, shape: tuple[int, ...], order: npt.NDArray[np.intp]) -> Floats:
    """Broadcast a column and sort it by schedule; a single number is returned unchanged."""
    values = np.asarray(column, dtype=np.float64)
    return values if values.ndim == 0 else np.broadcast_to(values, shape).ravel()[order]


def _schedule_slices(index: npt.NDArray[np.int8]) -> Iterator[tuple[PipelineSchedule, slice]]:
    """Yield each schedule that occurs in the sorted indices, and the slice of its rows."""
    known = schedules()
    ends = np.searchsorted(index, np.arange(len(known) + 1))
    for one, first, last in zip(known, ends, ends[1:], strict=False):
        if last > first:
            yield one, slice(first, last)
