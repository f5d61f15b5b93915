"""Uncertainty of the fitted knots: bootstrap intervals, and errors of predictions for runs left out of the fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardscope.measure.calibrate.design import Design, Floats
from shardscope.measure.calibrate.fit import Measured, Prior, fit, ratios

_RESAMPLES = 60
_LEAST = 0.05
"""Smallest relative half width of an interval: the drift in speed of a quiet machine."""
_LEVELS = (5, 50, 95)


class Intervals(NamedTuple):
    """Ends of the 90 % intervals of the knots' logarithms; arrays of shape `(knots,)`."""

    low: Floats
    high: Floats


def bootstrap(design: Design, measured: Measured, prior: Prior, x: Floats, jobs: Sequence[int]) -> Intervals:
    """Return intervals from fits to resampled jobs.

    All runs of a job are drawn together, with random weights, so that errors of the formulas and differences between
    runs of one job both widen the intervals. The prior's mean is drawn anew each time, so a knot that the runs do not
    determine keeps the width of its prior.

    Args:
        design: Predicted parts as a function of the knots.
        measured: Measured times of the same runs.
        prior: Prior of the knots.
        x: The fitted knots.
        jobs: Number of the job of each run.
    """
    random = np.random.default_rng(0)
    count, found = max(jobs) + 1, []
    for _ in range(_RESAMPLES):
        drawn = np.bincount(random.integers(count, size=count), minlength=count)[list(jobs)]
        share = drawn * random.exponential(size=len(jobs))
        mean = prior.mean + prior.deviation * random.normal(size=len(x))
        found.append(fit(design, measured, Prior(mean, prior.deviation), share=share, start=x))
    low, high = np.quantile(found, [0.05, 0.95], axis=0)
    return Intervals(np.minimum(low, x - _LEAST), np.maximum(high, x + _LEAST))


def left_out(design: Design, measured: Measured, prior: Prior, x: Floats, jobs: Sequence[int]) -> Floats:
    """Return measured / predicted step time of each run, predicted by a fit to the runs of the other jobs."""
    numbers, found = np.array(jobs), np.empty(len(jobs))
    for job in range(max(jobs) + 1):
        mine = numbers == job
        without = fit(design, measured, prior, share=np.where(mine, 0.0, 1.0), start=x)
        found[mine] = ratios(design, measured, without)[mine]
    return found


def quantiles(ratio: Floats) -> dict[str, float]:
    """Return the quantiles of measured / predicted time, by level in per cent."""
    return {str(level): float(np.percentile(ratio, level)) for level in _LEVELS}
