"""Evaluation of a learning-rate range test: the loss while the learning rate rises exponentially over the steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardscope.errors import SpecError

Floats = NDArray[np.float64]
FEWEST = 5
"""Minimum number of finite losses."""


@dataclass(frozen=True)
class RateSuggestions:
    """Learning rates suggested by a range test.

    Attributes:
        steepest: The rate at which the loss falls fastest against the logarithm of the rate. Smith 2015 (arXiv
            1506.01186, section 3.3) uses rates from where the loss starts to fall; fastai's ``lr_find`` (``steep``)
            uses this one.
        tenth_of_lowest: A tenth of the rate at which the loss is lowest; fastai's ``minimum``.
        lowest: The rate at which the loss is lowest: the upper limit for Smith's cycles.
    """

    steepest: float
    tenth_of_lowest: float
    lowest: float


def smoothed_loss(loss: ArrayLike, *, width: float | None = None) -> Floats:
    """Smooth losses with Gaussian weights.

    The window is symmetric, so that the smoothed curve does not lag. A moving average would lag, and shift every
    suggested rate upwards.

    Args:
        loss: Finite losses, step by step.
        width: Standard deviation of the weights in steps; None for 1/30 of the number of steps, at least 1.
    """
    values = np.asarray(loss, dtype=float)
    steps = np.arange(values.size)
    spread = max(1.0, values.size / 30) if width is None else width
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / spread) ** 2)
    return np.asarray(weights @ values / weights.sum(axis=1))


def suggest_rates(lr: ArrayLike, smooth: ArrayLike) -> RateSuggestions:
    """Suggest learning rates from a smoothed curve.

    Args:
        lr: Learning rates, rising.
        smooth: The smoothed loss at each rate.

    Raises:
        SpecError: There are too few points, or the loss never fell.
    """
    rates, losses = np.asarray(lr, dtype=float), np.asarray(smooth, dtype=float)
    if rates.size < FEWEST:
        raise SpecError(
            f"the range test has {rates.size} finite losses and needs {FEWEST}; use a lower `low` or more steps"
        )
    lowest = int(losses.argmin())
    if lowest == 0:
        raise SpecError(
            f"the loss was lowest at the first rate, {rates[0]:.3g}, and never fell; use a lower `low` or more steps"
        )
    slope = np.gradient(losses, np.log(rates))[: lowest + 1]
    return RateSuggestions(
        steepest=float(rates[int(slope.argmin())]),
        tenth_of_lowest=float(rates[lowest] / 10),
        lowest=float(rates[lowest]),
    )
