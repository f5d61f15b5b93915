"""Evaluation of a learning-rate range test, in which the learning rate rises exponentially from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardscope.errors import SpecError

Floats = NDArray[np.float64]
FEWEST = 5
"""Minimum number of finite losses that a range test needs."""


@dataclass(frozen=True)
class RateSuggestions:
    """Learning rates suggested by a range test.

    Attributes:
        steepest: The rate at which the loss falls fastest as a function of the rate's logarithm, as suggested by
            fastai's ``lr_find`` (``steep``).
        tenth_of_lowest: A tenth of the rate at which the loss is lowest, as suggested by fastai's ``minimum``.
        lowest: The rate at which the loss is lowest, which Smith 2015 (arXiv 1506.01186, section 3.3) uses as the upper
            limit of cyclical learning rates.
    """

    steepest: float
    tenth_of_lowest: float
    lowest: float


def smoothed_loss(loss: ArrayLike) -> Floats:
    """Return finite losses smoothed with Gaussian weights over steps.

    Because the weights are symmetric, the smoothed curve does not lag behind the losses. A moving average over past
    steps would lag, and so would shift every suggested rate upwards.
    The standard deviation of the weights is 1/30 of the number of steps, but at least 1.
    """
    values = np.asarray(loss, dtype=float)
    steps = np.arange(values.size)
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / max(1.0, values.size / 30)) ** 2)
    return np.asarray(weights @ values / weights.sum(axis=1))


def suggest_rates(lr: ArrayLike, smooth: ArrayLike) -> RateSuggestions:
    """Suggest learning rates from the smoothed losses of a range test.

    Args:
        lr: Learning rates, in increasing order.
        smooth: The smoothed loss at each rate.

    Raises:
        SpecError: There are too few losses, or the loss is lowest at the first rate.
    """
    rates, losses = np.asarray(lr, dtype=float), np.asarray(smooth, dtype=float)
    if rates.size < FEWEST:
        raise SpecError(
            f"the range test has {rates.size} finite losses, but needs {FEWEST}; use a lower `low` or more steps"
        )
    lowest = int(losses.argmin())
    if lowest == 0:
        raise SpecError(
            f"the loss is lowest at the first rate, {rates[0]:.3g}, so it never fell; use a lower `low` or more steps"
        )
    slope = np.gradient(losses, np.log(rates))[: lowest + 1]
    return RateSuggestions(
        steepest=float(rates[int(slope.argmin())]),
        tenth_of_lowest=float(rates[lowest] / 10),
        lowest=float(rates[lowest]),
    )
