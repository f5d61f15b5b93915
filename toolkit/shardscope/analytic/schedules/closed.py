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

A bubble is the maximum over a few critical paths. A rank is idle if some chain of dependent operations takes longer
than the rank's own work. For given numbers of ranks and micro-batches, the length of a chain is a sum of durations of
forwards, input gradients and weight gradients, so the bubble is the maximum of a few such sums. The papers give only
the sum that is largest if all durations are equal. The other sums were derived from the schedules' tables, and the
tests check all of them against these tables. The functions of a `Case` return the bubble: the idle time of the rank
that is idle longest, between the rank's first and last operations. Functions whose names end in ``ramp`` return the
minimum idle time if ranks synchronise between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.schedules.build import build
from shardscope.spec import registry
from shardscope.spec.pipeline_schedule import HeldTerms, PipelineSchedule, schedules

Numbers = npt.ArrayLike
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class ScheduleColumns(NamedTuple):
    """Properties of all schedules: arrays with one element per entry of `schedules`.

    The last five fields are from `HeldTerms`.
    """

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

    Each schedule's formula and its source are below, from `flush` on. For `v-half` and `v-min` on p ranks, the step
    time (work and bubble) is within 3 % of the time computed from the table, and mostly exact, if there are at least p
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
            return counted_bubble(one, case, v, ranks_meet=ranks_meet)
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
        return counted_in_flight(one, rank, p, m, v) if found is None else np.asarray(found)

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


def counted_in_flight(
    schedule: PipelineSchedule, rank: Any, ranks: Any, microbatches: Any, held: Any
) -> Floats:
    """Return the value of `PipelineSchedule.in_flight`, computed from a table for each element of the arguments."""

    def count(at: float, p: float, m: float, v: float) -> float:
        return build(schedule, int(p), int(m), int(v)).peak_activation()[int(at)]

    return np.asarray(np.vectorize(count, otypes=[float])(rank, ranks, microbatches, held))


def counted_bubble(schedule: PipelineSchedule, case: Case, held: Any, *, ranks_meet: bool) -> Floats:
    """Return the value of `PipelineSchedule.bubble`, computed from a table for each element of the arguments.

    If ranks synchronise between steps (`ranks_meet`), the bubble is the time of the whole step minus a rank's work;
    otherwise, it is the longest path from a rank's first to its last operation, minus this work. Shorter operations
    make neither time longer.
    """

    def count(*asked: float) -> float:
        p, m, f, i, w, v = asked
        timeline = build(schedule, int(p), int(m), int(v)).timeline({"F": f, "I": i, "W": w})
        whole = timeline.end if ranks_meet else timeline.longest_own_path
        return max(0.0, whole - m * v * (f + i + w))

    return np.asarray(np.vectorize(count, otypes=[float])(*case, held))


class Case(NamedTuple):
    """Numbers of ranks (p) and micro-batches (m), and durations of one stage's operations; arrays are broadcast.

    The durations are those of a forward (f), an input gradient (i) and a weight gradient (w), for one micro-batch.
    """

    p: Floats
    m: Floats
    f: Floats
    i: Floats
    w: Floats


def longest(first: Floats, *others: Floats) -> Floats:
    """Return the element-wise maximum of several arrays."""
    return np.asarray(reduce(np.maximum, others, first))


def flush(case: Case) -> Floats:
    """Return the bubble of GPipe, 1F1B and interleaved 1F1B: (p-1)(f+i+w).

    Huang et al. 2019, section 2.3; Narayanan et al. 2021 (SC), section 2.2.1 and, for v stages per rank, 2.2.2.
    """
    p, _, f, i, w = case
    return np.asarray((p - 1) * (f + i + w))


def interleaved_zero_bubble(case: Case) -> Floats:
    """Return the bubble of interleaved ZB-H1: (p-1)(f+i-w), as for ZB-H1, or (p-1) i if w > f."""
    p, _, f, i, w = case
    return (p - 1) * (i + np.maximum(f - w, 0))


def zb_h1(case: Case) -> Floats:
    """Return the bubble of ZB-H1: (p-1)(f+i-w), or (p-1) i if w > f.

    Source: Qi et al. 2023, section 2.3, where the durations are called T_F, T_B and T_W. With fewer micro-batches than
    ranks, fewer weight gradients can be deferred, so the bubble is larger.
    """
    p, m, f, i, w = case
    late = np.minimum(p - 1, m - 1)
    return np.asarray((p - 1) * (f + i) - late * np.minimum(f, w))


def zb_h2(case: Case) -> Floats:
    """Return the bubble of ZB-H2: (p-1)(f+i-2w) for equal durations (Qi et al. 2023, section 2.3).

    With fewer than 2p-1 micro-batches, fewer weight gradients can be deferred, so the bubble is larger.
    """
    p, m, f, i, w = case
    q, late = p - 1, np.minimum(2 * (p - 1), m - 1)
    half = late // 2
    return longest(
        q * (f + i) - late * w,
        (q - late) * f + q * i,
        (q - late + half) * f + (q - half) * i,
        (q - half) * (f + i) - (late - 2 * half) * w,
    )


def zbv(case: Case) -> Floats:
    """Return the bubble of ZBV: 0 for equal durations and at least 2p-1 micro-batches (Qi et al. 2023, section 6).

    The order of operations is torch's, which was designed for equal durations. The formula is exact for equal
    durations. It is also exact for unequal durations with at least 2p-1 micro-batches, unless w < i < f: then the
    returned bubble can be too small by a few per cent of a step.
    """
    p, m, f, i, w = case
    q = p - 1
    few = longest(
        2 * np.maximum(q - m + 1, 0) * f + 2 * q * i - 2 * np.maximum(m - p, 0) * w, (2 * q - m + 1) * (f + i)
    )
    many = longest(
        0.0 * f,
        2 * q * (i - w),
        q * (i - f),
        i - q * f + (q - 1) * w,
        (q - 1) * np.abs(w - f),
        q * (2 * f - i - w),
        (q - 1) * (f - i),
        (2 * q - 1) * f + i - 2 * q * w,
    )
    return np.where(p == 1, 0.0, np.where(m < 2 * p - 1, few, many))


def dualpipev(case: Case) -> Floats:
    """Return the bubble of DualPipeV: (p-1) f for equal durations.

    DeepSeek's table (DualPipe's README, 2025) states (p-1)(F&B + B - 3W), where F&B is a forward and a backward that
    run as one operation, with both results ready at its end. Here the two passes run in sequence, so the result of the
    first is sent earlier.
    """
    p, _, f, i, w = case
    q = p - 1
    sums = longest(
        q * f,
        2 * q * i - q * w - f,
        q * (f + i - w),
        q * i - f,
        2 * q * (f - w),
        q * (2 * f - i - w),
    )
    return np.where(p == 1, 0.0, sums)


def v_half(case: Case) -> Floats:
    """Return the bubble of V-Half: about (p-1)(f+i+w), half of 1F1B's, whose stages take twice as long.

    Source: Qi et al. 2024. For equal durations d, the bubble is (3p-3) d for even p and (3p-4) d for odd p. If input
    gradients or forwards take much longer than the other operations, the bubble grows with the number of micro-batches.
    """
    p, m, f, i, w = case
    odd, ramp = p % 2, p - 1
    wide = ramp + 2 * (1 - odd)
    least = longest(
        wide * f + 3 * ramp * i - (p + 1 - odd) * w,
        wide * f + (2 * p - 3 + odd) * i - w,
        (wide + 1) * f + (2 * p - 5 + odd) * i,
        (2 * m + p - 2) * f - (2 * m - 2 * p + 1 + odd) * i,
        (2 * m + 2 * p - 4) * f - (2 * m - 2 * p + 1 + odd) * i - (p - 2) * w,
        (2 * m + 2 * p - 4) * f - (2 * m - 2 * p - 1 + odd) * i - p * w,
        (2 * m + 2 * p - 5 + odd) * f - (2 * m - 2 * p - 3 + 3 * odd) * i - (p + 1 - odd) * w,
        (2 * p + 3 * (1 - odd) - 2 * m) * f
        + (2 * m + 2 * p - 5 + odd) * i
        - np.where(p == 3, 2 * m - 1, m + (p + 2 - odd) / 2) * w,
    )
    few = 2 * ramp * (f + i) - (1 + 2 * np.maximum(m - 2 + odd, 0)) * w
    sums = np.where(p == 2, _v_half_of_two(m, f, i, w), least)
    return np.where(p == 1, 0.0, np.where(m < p // 2 + 1, few, sums))


def _v_half_of_two(m: Floats, f: Floats, i: Floats, w: Floats) -> Floats:
    """Return the bubble of V-Half on two ranks."""
    return longest(
        3 * (f + i - w),
        3 * f + i - w,
        f + 4 * i - 3 * w,
        2 * f,
        (7 - 2 * m) * f + (2 * m - 1) * (i - w),
        (5 - 2 * m) * f + 2 * m * i - (2 * m - 1) * w,
        2 * m * f - (2 * m - 3) * i - (m - 1) * w,
    )


def v_min(case: Case) -> Floats:
    """Return the bubble of V-Min: about 4/3 (p-1)(f+i+w), 2/3 of 1F1B's, whose stages take twice as long.

    Source: Qi et al. 2024. For equal durations d, the bubble is (4p-5) d, or (4p-3) d if 3 divides p. If forwards or
    input gradients take more than a third of the work, the bubble grows with the number of micro-batches, because the
    work of two micro-batches on a rank takes at least as long as six forwards or six input gradients.
    """
    p, m, f, i, w = case
    sums = np.where(p == 2, _v_min_of_two(m, f, i, w), np.where(p % 3 == 0, *_v_min_of_more(p, m, f, i, w)))
    return np.where(p == 1, 0.0, np.where(m == 1, 2 * (p - 1) * (f + i) - w, sums))


def _v_min_of_two(m: Floats, f: Floats, i: Floats, w: Floats) -> Floats:
    """Return the bubble of V-Min on two ranks."""
    return longest(
        3 * f,
        (3 - m) * f + 2 * m * i - m * w,
        2 * m * f + (3 - m) * i - m * w,
        (m + 1) * (f + i) - (2 * m - 1) * w,
    )


def _v_min_of_more(p: Floats, m: Floats, f: Floats, i: Floats, w: Floats) -> tuple[Floats, Floats]:
    """Return two bubbles of V-Min, both for p > 2 ranks: the first if p is a multiple of 3, the second otherwise."""
    k, rest = p // 3, p % 3
    small, large, late = 2 * p - 2 * m, 2 * p - 6 + 4 * m, (2 * m - 1) * w
    # A rank's weight gradients fill its waits, at most all of them; else shorter ones would lengthen the step.
    few, many = np.minimum(k + 1, 2 * m) * w, np.minimum(2 * k, 2 * m) * w
    paused = longest(
        (8 * k - 1) * f + (5 * k - 1) * i - few,
        (5 * k + 2) * f + (8 * k - 4) * i - few,
        (small + 1) * f + large * i - late,
        (small + 4) * f + (large - 2) * i - late,
        (large - 2) * f + (small + 4) * i - late,
    )
    one = rest == 1
    straight = longest(
        np.where(one, 8 * k, 10 * k + 1) * f + np.where(one, 5 * k, 4 * k + 2) * i - np.where(one, few, many),
        np.where(one, 5 * k, 4 * k + 3) * f + np.where(one, 8 * k, 10 * k) * i - np.where(one, few, many),
        small * f + large * i - late,
        large * f + small * i - late,
    )
    return paused, straight


def interleaved_ramp(case: Case) -> Floats:
    """Return the ramp of plain and interleaved ZB-H1: (p-1) f, until the last rank starts, which then never waits."""
    p, _, f, _, _ = case
    return np.asarray((p - 1) * f)


def zb_h2_ramp(case: Case) -> Floats:
    """Return the ramp of ZB-H2: (p-1) f as in `interleaved_ramp`, and with few micro-batches also waiting time."""
    p, m, f, i, _ = case
    late = np.minimum(2 * (p - 1), m - 1)
    return np.asarray((p - 1) * f + (p - 1 - (late + 1) // 2) * i)


def zbv_ramp(case: Case) -> Floats:
    """Return the ramp of ZBV; since its stages form a V, ranks not only start but also finish one after another."""
    p, m, f, i, w = case
    q = p - 1
    sums = longest(
        q * i,
        np.maximum(f, i) + (q - 1) * w,
        2 * q * (i - w),
        (2 * q - 1) * f - (q - 1) * i,
        2 * q * f - q * i - w,
    )
    return np.where(p == 1, 0.0, np.where(m < 2 * p - 1, q * i, sums))
