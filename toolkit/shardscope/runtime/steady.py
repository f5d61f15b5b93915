"""What a figure comes to per step of a run, once the first steps are over: defined here for every table and plot.

Most steps of a run are alike, and their mean or median says what one is like. Under local SGD they are not: of every
`period` steps only the last one talks to the other ranks. A median of such steps would say that nothing is ever sent.
So the two sorts of steps are taken apart and weighted as often as they come, whichever of them were written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

WARM_UP_STEPS = 2
"""Steps left out at the start, where buckets are built and memory is touched for the first time."""

Average = Literal["mean", "median"]
"""Of steps that are alike: the mean for what adds up, such as bytes; the median for times, which stray."""


def per_step(by_step: Mapping[int, float], period: int = 1, *, average: Average = "mean") -> float | None:
    """What a figure comes to per step, over whole periods.

    Args:
        by_step: The figure at each step that has it, from step 1.
        period: Steps after which steps repeat themselves (`Compression.period`); the last of them is unlike the others.
        average: How steps that are alike are averaged.

    Returns:
        None where no step has the figure, or none of one of the two sorts.

    Example:
        >>> per_step({1: 9, 2: 9, 3: 0, 4: 80, 5: 0, 6: 0, 7: 0}, 4)
        20.0
    """
    steps = sorted(by_step)
    return per_step_of(steps, [by_step[step] for step in steps], period, average=average)


def per_step_of(
    steps: npt.ArrayLike, values: npt.ArrayLike, period: int = 1, *, average: Average = "mean"
) -> float | None:
    """As `per_step`, of steps in their order and the figure at each, as columns."""
    numbers, figures = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    mean = np.mean if average == "mean" else np.median
    for first in (WARM_UP_STEPS, 0):
        if period == 1 and len(figures) > first:
            return float(mean(figures[first:]))
        is_last = numbers[first:] % period == 0
        last, others = figures[first:][is_last], figures[first:][~is_last]
        if len(last) and len(others):
            return float((mean(last) + (period - 1) * mean(others)) / period)
    return None
