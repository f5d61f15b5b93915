"""Expected compute time of the slowest of many ranks (the straggler): order statistics and jitter of compute times.

Ranks that synchronise in each step wait for the slowest rank, so a step takes the expected maximum over ranks. For n
normal times with mean μ and standard deviation σ, this is about μ + σ sqrt(2 ln n); the exact value is an integral over
the density of the order statistic (David and Nagaraja, Order Statistics, 3rd edition, sections 2.1 and 4.5):

    E = integral of x f(x) dx, where f = n! / ((k - 1)! (n - k)!) F^(k - 1) (1 - F)^(n - k) F'

for the k-th smallest of n times with distribution F: k = n is the maximum, and k = n - b the time of an update that
drops the b slowest gradients. Ranks that synchronise only every H steps wait for the slowest mean over H steps, whose
standard deviation is smaller by a factor of sqrt(H).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import erfc, sqrt
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.errors import SpecError

__all__ = [
    "Jitter",
    "expected_slowest",
    "jitter_of",
]

Floats = npt.NDArray[np.float64]
Distribution = Literal["normal", "lognormal"]

_REACH, _POINTS = 13.0, 6001
"""Range of the integral, in standard deviations, and its number of points; the relative error is below 1e-13 for 8 to
2**30 ranks, compared with a quadrature of 30 digits."""
_MOST = 2.0**30
_FEWEST_STEPS = 2


class _Grid(NamedTuple):
    x: Floats
    log_density: Floats
    log_below: Floats
    log_above: Floats


@cache
def _grid() -> _Grid:
    """Return points of a standard normal variable, with logarithms of its density and of both tails there."""
    x = np.linspace(-_REACH, _REACH, _POINTS)
    above = np.array([erfc(each / sqrt(2)) / 2 for each in x])
    log_above = np.where(x < 0, np.log1p(-np.minimum(above[::-1], 0.5)), np.log(above))
    return _Grid(x, -(x**2) / 2 - np.log(2 * np.pi) / 2, log_above[::-1], log_above)


@cache
def _log_choose(ranks: float, dropped: float) -> float:
    """Return the logarithm of n! / ((k - 1)! (n - k)!), with k = n - dropped."""
    from math import lgamma

    return lgamma(ranks + 1) - lgamma(ranks - dropped) - lgamma(dropped + 1)


def expected_slowest(
    mean: npt.ArrayLike,
    std: npt.ArrayLike,
    ranks: npt.ArrayLike,
    *,
    dropped: npt.ArrayLike = 0,
    every: npt.ArrayLike = 1,
    distribution: Distribution = "lognormal",
) -> Floats:
    """Return the expected time of the slowest rank that is waited for; the times of ranks are independent.

    All numbers may be arrays, which are broadcast against each other.

    Args:
        mean: Mean time of a rank, above 0 for ``lognormal``.
        std: Standard deviation of a rank's time, at least 0.
        ranks: n, the number of ranks.
        dropped: Number of the slowest ranks that are not waited for, below n.
        every: Number of steps between two synchronisations of the ranks; the result is the mean time of one step.
        distribution: ``normal``, or ``lognormal`` for times, which are positive and skewed.

    Example:
        >>> round(float(expected_slowest(100.0, 5.0, 4096, distribution="normal")), 1)
        118.1

    Raises:
        SpecError: An argument is out of range.
    """
    each = np.broadcast_arrays(*(np.asarray(value, float) for value in (mean, std, ranks, dropped, every)))
    _check(*each)
    values = np.vectorize(_expected, otypes=[float], excluded={5, "distribution"})
    found: Floats = np.asarray(values(*each, distribution=distribution))
    return found


def _check(mean: Floats, std: Floats, ranks: Floats, dropped: Floats, every: Floats) -> None:
    if (std < 0).any() or (mean <= 0).any():
        raise SpecError("mean must be above 0 and std at least 0; give times in seconds")
    valid = (ranks >= 1) & (ranks <= _MOST) & (dropped >= 0) & (dropped < ranks)
    if not valid.all():
        wrong = int(np.argmin(valid))
        raise SpecError(
            f"ranks={ranks.flat[wrong]:g} with dropped={dropped.flat[wrong]:g} is not valid; give 1 to 2**30 ranks, "
            "and drop fewer than all"
        )
    if (every < 1).any():
        raise SpecError(f"every={every.min():g} is not valid; give at least 1")


def _expected(  # noqa: PLR0917 - np.vectorize passes its arrays by position
    mean: float, std: float, ranks: float, dropped: float, every: float, distribution: Distribution
) -> float:
    grid = _grid()
    log_weight = (
        _log_choose(float(ranks), float(dropped)) + (ranks - dropped - 1) * grid.log_below
        + dropped * grid.log_above + grid.log_density
    )  # fmt: skip
    weight = np.exp(log_weight)
    weight /= weight.sum()  # rounding in `_log_choose` scales them all, for 2**30 ranks by 4e-6
    own = std / sqrt(every)
    if distribution == "normal":
        return float(mean + own * (weight @ grid.x))
    sigma = sqrt(np.log1p((own / mean) ** 2))
    return float(mean * (weight @ np.exp(sigma * grid.x - sigma**2 / 2)))


@dataclass(frozen=True)
class Jitter:
    """Variation of compute times between ranks and between steps, as log-normal factors of the mean.

    Attributes:
        mean_s: Mean compute time of a rank in a step, in seconds.
        between: Standard deviation of the logarithm of a rank's own speed, which it keeps from step to step.
        within: Standard deviation of the logarithm of the time of one step of one rank, excluding the rank's own speed
            and effects that all ranks share in a step.
        num_ranks: Number of measured ranks.
        num_steps: Number of measured steps.
    """

    mean_s: float
    between: float
    within: float
    num_ranks: int
    num_steps: int

    def slowest_s(
        self, ranks: npt.ArrayLike, *, dropped: npt.ArrayLike = 0, every: npt.ArrayLike = 1
    ) -> Floats:
        """Return the expected time per step of the slowest rank that is waited for, in seconds.

        Ranks keep their own speed between synchronisations; the variation `within` averages out over `every` steps.
        For the arguments, see `expected_slowest`.
        """
        variance = self.between**2 + self.within**2 / np.asarray(every, float)
        std = self.mean_s * np.sqrt(np.expm1(variance))
        return expected_slowest(self.mean_s, std, ranks, dropped=dropped)

    def slowdown(
        self, ranks: npt.ArrayLike, *, dropped: npt.ArrayLike = 0, every: npt.ArrayLike = 1
    ) -> Floats:
        """Return `slowest_s` relative to the mean time of a rank."""
        return self.slowest_s(ranks, dropped=dropped, every=every) / self.mean_s


def jitter_of(seconds: npt.ArrayLike) -> Jitter:
    """Return the jitter of measured compute times.

    The variance of the logarithms l is split into parts of ranks, of steps, and of the residuals, as in a two-way
    analysis of variance with one value in each cell (Searle, Casella and McCulloch, Variance Components, chapter 4):

        within² = Σ (l - l_rank - l_step + l_mean)² / ((ranks - 1)(steps - 1))
        between² = variance of l_rank - within² / steps

    Steps that are slow on all ranks alike make no rank wait, so their part is left out.

    Args:
        seconds: Times of shape (steps, ranks), at least 2 of each, all above 0.

    Raises:
        SpecError: There are too few times, or a time is not positive.
    """
    table = np.asarray(seconds, float)
    if table.ndim != 2 or min(table.shape) < _FEWEST_STEPS:
        raise SpecError(
            f"seconds has the shape {table.shape}; give at least 2 steps and 2 ranks, as (steps, ranks)"
        )
    if not (table > 0).all():
        raise SpecError(f"seconds has the value {table.min():g}; give times above 0")
    logs = np.log(table)
    steps, ranks = logs.shape
    residuals = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    within = float((residuals**2).sum() / ((ranks - 1) * (steps - 1)))
    between = float(logs.mean(axis=0).var(ddof=1)) - within / steps
    return Jitter(float(table.mean()), sqrt(max(0.0, between)), sqrt(within), ranks, steps)
