"""Bubble and memory of every schedule as closed forms over arrays, for searches through millions of layouts.

A schedule is given by its index into `spec.layout.SCHEDULE_NAMES`; everything broadcasts. Times are those of one
micro-batch on a whole rank, that is, through all stages that the rank holds, so that they do not depend on the number
of virtual stages; memory is counted in activations of one micro-batch on a whole rank too. Sending takes
no time here.

Held against the counted tables (tests/analytic/test_schedules_closed.py):
    equal durations                 bubble and memory exact, every schedule, any number of micro-batches it accepts
    any durations                   bubble exact, except as follows
    zbv                             exact from 2p-1 micro-batches up, unless t_weight < t_input < t_f
    v-half and v-min                close from p micro-batches up (see `bubble_time`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shardscope.analytic.schedules.facts import FACTS
from shardscope.analytic.schedules.paths import BUBBLES, RAMPS, Case, Floats
from shardscope.spec.layout import SCHEDULE_NAMES

Numbers = npt.ArrayLike
InFlight = Callable[[Floats, Floats, Floats, Floats | float], Floats]
"""Takes rank, ranks, micro-batches and stages a rank."""
_INTERLEAVED = ("interleaved", "zero-bubble")


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
    """Seconds in a step for which the rank that waits most stands idle between its first and its last operation.

    Args:
        schedule: Index into `SCHEDULE_NAMES`.
        stages: Ranks in the pipeline.
        microbatches: Of one step.
        virtual_stages: Stages that each rank holds; only the interleaved schedules look at it.
        t_f: Seconds of one micro-batch's forward pass on a whole rank.
        t_input: Of the backward pass for the input.
        t_weight: Of the backward pass for the weights.
        ranks_meet: All ranks wait for one another between steps, as for clipping gradients by their norm. The
            zero-bubble papers avoid it by checking afterwards; with it, some of their bubble comes back as a ramp.

    The work of a rank and this together are the time of a step.

    The formulas and their sources are in `paths`. For `v-half` and `v-min` from p micro-batches up and with t_input
    0.7 to 2.6 and t_weight 0.4 to 1.4 times t_f, work and bubble together are within 2.5 % of the counted step, and
    mostly exact.

    Example:
        >>> float(bubble_time(SCHEDULE_NAMES.index("zb-h1"), 4, 8, 1, 1.0, 1.0, 1.0))
        3.0
    """
    inputs = (stages, microbatches, virtual_stages, t_f, t_input, t_weight)

    def seconds(name: str, rows: Sequence[Floats]) -> Floats:
        p, m, given, *durations = rows
        v = _held(name, given)
        case = Case(p, m, *(duration / v for duration in durations))
        bubble = BUBBLES[name](case)
        return np.maximum(bubble, RAMPS[name](case)) if ranks_meet and name in RAMPS else bubble

    return _by_schedule(schedule, inputs, seconds)


def in_flight(
    schedule: Numbers, stage: Numbers, stages: Numbers, microbatches: Numbers, virtual_stages: Numbers
) -> Floats:
    """What a rank holds at most, in activations of one micro-batch on a whole rank.

    Args:
        schedule: Index into `SCHEDULE_NAMES`.
        stage: Place of the rank in the pipeline, from 0.
        stages: Ranks in the pipeline.
        microbatches: Of one step.
        virtual_stages: Stages that each rank holds; only the interleaved schedules look at it.

    Exact at any number of micro-batches; for `v-half` and `v-min` with fewer than ranks it is an upper bound. Sources:
    GPipe m; 1F1B p - stage (Narayanan et al. 2021, ICML, section 3.2); interleaved by its warm-up (the same, SC,
    section 2.2); ZB-H1 p and ZB-H2 2p-1 (Qi et al. 2023, sections 2.1 and 2.2); ZB-V p (section 6); V-Half p/2
    and V-Min p/3, rounded as their building blocks are (Qi et al. 2024); DualPipeV p + 1/2 (DualPipe's README, PP + 1
    of half ranks).

    Example:
        >>> float(in_flight(SCHEDULE_NAMES.index("1f1b"), 1, 4, 8, 1))
        3.0
    """

    def held(name: str, rows: Sequence[Floats]) -> Floats:
        rank, p, m, given = rows
        return _IN_FLIGHT[name](rank, p, m, _held(name, given))

    return _by_schedule(schedule, (stage, stages, microbatches, virtual_stages), held)


def _held(name: str, given: Floats) -> Floats | float:
    """Stages of a rank: as given where the schedule leaves the choice."""
    return given if name in _INTERLEAVED else float(FACTS[name].shape.default)


def _by_schedule(
    schedule: Numbers, inputs: Sequence[Numbers], formula: Callable[[str, Sequence[Floats]], Floats]
) -> Floats:
    """Each schedule's formula on the rows that have it."""
    index = np.asarray(schedule)
    shape = np.broadcast_shapes(index.shape, *(np.shape(column) for column in inputs))
    if index.ndim == 0:
        values = formula(
            SCHEDULE_NAMES[int(index)], [np.asarray(column, dtype=np.float64) for column in inputs]
        )
        return np.array(np.broadcast_to(values, shape))
    flat = np.broadcast_to(index, shape).ravel().astype(np.int8)
    order = np.argsort(flat, kind="stable")
    columns = [_sorted(column, shape, order) for column in inputs]
    out = np.empty(flat.size)
    for name, rows in _runs(flat[order]):
        out[order[rows]] = formula(name, [column[rows] if column.ndim else column for column in columns])
    return out.reshape(shape)


def _sorted(column: Numbers, shape: tuple[int, ...], order: npt.NDArray[np.intp]) -> Floats:
    """A column in the order of the schedules; what is one number stays one."""
    values = np.asarray(column, dtype=np.float64)
    return values if values.ndim == 0 else np.broadcast_to(values, shape).ravel()[order]


def _runs(index: npt.NDArray[np.int8]) -> Iterator[tuple[str, slice]]:
    """Every schedule that occurs, and where in the sorted rows."""
    ends = np.searchsorted(index, np.arange(len(SCHEDULE_NAMES) + 1))
    for name, first, last in zip(SCHEDULE_NAMES, ends, ends[1:], strict=False):
        if last > first:
            yield name, slice(first, last)


def _interleaved(rank: Floats, p: Floats, m: Floats, v: Floats | float) -> Floats:
    per_round = m // np.maximum(1, m // p)
    return np.minimum((v - 1) * per_round + 2 * (p - rank) - 1, m * v) / v


def _zero_bubble(rank: Floats, p: Floats, m: Floats, v: Floats | float) -> Floats:  # noqa: ARG001
    per_round = m // np.maximum(1, m // p)
    return np.minimum((v - 1) * per_round + p, m * v) / v


def _on_a_v(most: Callable[[Floats, Floats], Floats]) -> InFlight:
    """Few micro-batches come back up before the first ranks are through with their way down."""

    def held(rank: Floats, p: Floats, m: Floats, v: Floats | float) -> Floats:  # noqa: ARG001
        return np.minimum(np.minimum(m, (m + rank + 1) / 2), most(rank, p))

    return held


_IN_FLIGHT: dict[str, InFlight] = {
    "gpipe": lambda _, __, m, ___: m,
    "1f1b": lambda rank, p, m, _: np.minimum(m, p - rank),
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "zb-h1": lambda _, p, m, __: np.minimum(m, p),
    "zb-h2": lambda _, p, m, __: np.minimum(m, 2 * p - 1),
    "zbv": _on_a_v(lambda _, p: p),
    "v-half": _on_a_v(lambda _, p: p // 2 + 1),
    "v-min": _on_a_v(lambda rank, p: (p + 4) // 3 - ((p % 3 == 2) & (rank % 3 == 0))),
    "dualpipev": lambda _, p, m, __: np.minimum(m, p + 0.5),
}
