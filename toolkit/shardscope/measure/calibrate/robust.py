"""Robust least squares with a prior, the minimisation used by both fits of constants."""

from __future__ import annotations

from collections.abc import Callable
from math import isinf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def minimum(
    residuals: Callable[[Floats], Floats],
    slopes: Callable[[Floats], Floats],
    start: Floats,
    *,
    mean: Floats,
    root: Floats,
    scale: float,
    share: Floats | float = 1.0,
) -> Floats:
    """Return the point that minimises a Cauchy loss of residuals plus the squared distance from the prior's mean.

    Args:
        residuals: Function that returns the residuals in standard deviations, shape `(n,)`.
        slopes: Function that returns their derivatives, shape `(n, k)`.
        start: Initial point, shape `(k,)`; if there are several minima, a nearby one is found.
        mean: Mean of the prior, shape `(k,)`.
        root: A matrix whose square, ``root.T @ root``, is the inverse of the prior's covariance.
        scale: Residual at which a measurement has half the weight; infinite for ordinary least squares.
        share: Weight of each residual.
    """
    from scipy.optimize import least_squares  # takes a third of a second

    count = len(residuals(start))

    def loss(squares: Floats) -> Floats:
        """Return the loss and its first two derivatives; the distance from the prior's mean enters as its square."""
        rows = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        if not isinf(scale):
            near = 1.0 / (1.0 + squares[:count])
            rows[:, :count] = np.log1p(squares[:count]), near, -(near**2)
        rows[:, :count] *= share
        return rows

    found = least_squares(
        lambda x: np.concatenate([residuals(x), root @ (x - mean)]), start,
        jac=lambda x: np.vstack([slopes(x), root]), loss=loss, f_scale=1.0 if isinf(scale) else scale,
    )  # fmt: skip
    return np.asarray(found.x, np.float64)
