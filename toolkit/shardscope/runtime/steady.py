"""What a figure comes to per step of a run, once the first steps are over: defined here for every table and plot.

Most steps of a run are alike, and their mean or median says what one is like. Under local SGD they are not: of every
`period` steps only the last one talks to the other ranks. A median of such steps would say that nothing is ever sent.
So the two sorts of steps are taken apart and weighted as often as they come, whichever of them were written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

WARM_UP_STEPS = 2
"""Steps left out at the start, where buckets are built and memory is touched for the first time."""

Average = Callable[[Iterable[float]], float]


def per_step(by_step: Mapping[int, float], period: int = 1, *, average: Average = fmean) -> float | None:
    """What a figure comes to per step, over whole periods.

    Args:
        by_step: The figure at each step that has it, from step 1.
        period: Steps after which steps repeat themselves (`Compression.period`); the last of them is unlike the others.
        average: Of steps that are alike: `fmean` for what adds up, such as bytes; `median` for times, which stray.

    Returns:
        None where no step has the figure, or none of one of the two sorts.

    Example:
        >>> per_step({1: 9, 2: 9, 3: 0, 4: 80, 5: 0, 6: 0, 7: 0}, 4)
        20.0
    """
    steps = sorted(by_step)
    for shown in (steps[WARM_UP_STEPS:], steps):
        last = [by_step[step] for step in shown if step % period == 0]
        others = [by_step[step] for step in shown if step % period]
        if last and (others or period == 1):
            return (average(last) + (period - 1) * (average(others) if others else 0.0)) / period
    return None
