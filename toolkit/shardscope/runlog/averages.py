"""Averages per step, without warm-up and weighted by the kinds of steps.

Most steps of a run are similar, so their mean or median is representative. Some are not: with local SGD, only every
`period`-th step communicates with the other ranks, and some compressors send the first steps uncompressed. A
median over all steps would report one kind only. So each kind is averaged separately and weighted by how often it
occurs, whichever steps were recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shardscope.spec import Job

WARM_UP_STEPS = 2
"""Number of steps excluded at the start of each kind, when buckets are built and memory is first touched."""

Average = Literal["mean", "median"]
"""Average over steps of the same kind: mean for additive quantities such as bytes, median for times (outliers)."""
Floats = npt.NDArray[np.float64]


class StepKinds(NamedTuple):
    """How the steps of a job differ.

    Attributes:
        period: Only every `period`-th step communicates (local SGD); 1 if all steps communicate.
        uncompressed: Number of steps at the start whose gradients are sent uncompressed.
    """

    period: int = 1
    uncompressed: int = 0

    @classmethod
    def of(cls, job: Job) -> StepKinds:
        """Return the kinds of steps of a job."""
        return cls(job.compression.period, job.compression.uncompressed(job.steps))


ALIKE = StepKinds()


def per_step(
    steps: npt.ArrayLike,
    values: npt.ArrayLike,
    kinds: StepKinds = ALIKE,
    *,
    average: Average = "mean",
    until: int | None = None,
) -> float | None:
    """Return the average of a quantity per step, from the first of these steps to `until`.

    Args:
        steps: Numbers of the finished steps, ascending from 1.
        values: The quantity at each step; NaN where it is not known.
        kinds: How the steps differ.
        average: How steps of the same kind are averaged.
        until: Last step up to which kinds are counted for their weights, such as the last step of a job that is still
            running; None takes the last of `steps`.

    Returns:
        The average; None if no step has a value, or if a kind of step that occurs has no value.

    Example:
        >>> per_step([1, 2, 3, 4, 5, 6, 7], [9, 9, 0, 80, 0, 0, 0], StepKinds(period=4))
        20.0
    """
    numbers, figures = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    if not len(numbers):
        return None
    begin, end = int(numbers[0]), int(numbers[-1]) if until is None else until
    border = min(max(kinds.uncompressed + 1, begin), end + 1)  # first step after the uncompressed ones
    is_known, is_first = ~np.isnan(figures), numbers < border
    shares = ((border - begin, is_known & is_first), (end + 1 - border, is_known & ~is_first))
    found = [
        (count, _alike(numbers[chosen], figures[chosen], kinds.period, average))
        for count, chosen in shares
        if count
    ]
    known = [(count, mean) for count, mean in found if mean is not None]
    if len(known) < len(found):
        return None
    return known[0][1] if len(known) == 1 else sum(count * mean for count, mean in known) / (end + 1 - begin)


def _alike(numbers: npt.NDArray[np.int64], figures: Floats, period: int, average: Average) -> float | None:
    """Return the average over whole periods of steps; None until a period has ended."""
    mean = np.mean if average == "mean" else np.median
    for first in (WARM_UP_STEPS, 0):
        if period == 1 and len(figures) > first:
            return float(mean(figures[first:]))
        is_last = numbers[first:] % period == 0
        last, others = figures[first:][is_last], figures[first:][~is_last]
        if len(last) and len(others):
            return float((mean(last) + (period - 1) * mean(others)) / period)
    return None
