"""The gradient noise scale: the batch size beyond which larger batches improve gradients less than proportionally.

Let G be the gradient over all data and Sigma the covariance of a single sample's gradient. The mean of B samples'
gradients then has ``E|g_B|^2 = |G|^2 + tr(Sigma) / B``. Two batch sizes give two equations. The two norms that a
data-parallel step provides anyway, of a rank's own gradient and of the mean gradient, therefore determine both |G|^2
and tr(Sigma). Their ratio ``tr(Sigma) / |G|^2`` is the simple noise scale, an estimate of the critical batch size.

McCandlish, Kaplan, Amodei et al. 2018, An empirical model of large-batch training (arXiv 1812.06162), appendix A.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardscope.analytic.large_batch.scaling import positive
from shardscope.errors import SpecError

Floats = NDArray[np.float64]
_NORMAL_QUANTILE = 1.959964
"""Quantile of the standard normal distribution: 95 % of values are within plus or minus this."""


def _check_batches(small_batch: ArrayLike, large_batch: ArrayLike) -> tuple[Floats, Floats]:
    small, large = positive("small_batch", small_batch), positive("large_batch", large_batch)
    if not (small < large).all():
        raise SpecError(
            f"small_batch={small_batch!r} must be below large_batch={large_batch!r}; one batch size alone does not "
            "tell noise from gradient"
        )
    return small, large


def gradient_square(
    small_square: ArrayLike, large_square: ArrayLike, *, small_batch: ArrayLike, large_batch: ArrayLike
) -> Floats:
    """``(B L - b s) / (B - b)``: unbiased estimate of |G|^2, with G over all data (A.1 there); may be negative.

    Args:
        small_square: ``s``, the squared norm of a gradient over `small_batch` samples.
        large_square: ``L``, the squared norm over `large_batch` samples.
        small_batch: ``b``, in samples.
        large_batch: ``B``, in samples, above `small_batch`.

    Raises:
        SpecError: A batch is not above 0, or `small_batch` is not below `large_batch`.
    """
    small, large = _check_batches(small_batch, large_batch)
    return np.asarray((large * np.asarray(large_square) - small * np.asarray(small_square)) / (large - small))


def gradient_trace(
    small_square: ArrayLike, large_square: ArrayLike, *, small_batch: ArrayLike, large_batch: ArrayLike
) -> Floats:
    """``(s - L) / (1/b - 1/B)``: unbiased estimate of tr(Sigma) of a single sample's gradient; same arguments.

    Raises:
        SpecError: As for `gradient_square`.
    """
    small, large = _check_batches(small_batch, large_batch)
    return np.asarray((np.asarray(small_square) - np.asarray(large_square)) / (1 / small - 1 / large))


@dataclass(frozen=True)
class NoiseEstimate:
    """Estimate of the noise scale: one for many steps together, or one at each step from all steps up to it.

    Attributes:
        gradient_square: |G|^2, averaged.
        trace: tr(Sigma), averaged.
        critical_batch: tr(Sigma) / |G|^2, the simple noise scale in samples; infinite if the mean |G|^2 is not above 0.
        low: Lower end of the 95 % confidence interval of `critical_batch`, in samples.
        high: Upper end of that interval, in samples; infinite if |G|^2 does not differ significantly from 0.
    """

    gradient_square: Floats
    trace: Floats
    critical_batch: Floats
    low: Floats
    high: Floats


def estimate(
    small_square: ArrayLike,
    large_square: ArrayLike,
    *,
    small_batch: float,
    large_batch: float,
    blocks: int = 20,
) -> NoiseEstimate:
    """Estimate the noise scale from all steps (the last axis), for a model that hardly changes during them.

    |G|^2 and tr(Sigma) are averaged separately and then divided: a mean of ratios would be biased, as |G|^2 of single
    steps is close to 0 or even negative (A.1 there). The interval treats means over blocks of consecutive steps as
    independent draws, and uses Fieller's theorem (1954) for their ratio.

    Args:
        small_square: Squared norms over `small_batch` samples, step by step.
        large_square: Squared norms over `large_batch` samples, step by step.
        small_batch: Smaller batch, in samples.
        large_batch: Larger batch, in samples.
        blocks: Number of blocks, at least 2 and at most the number of steps.

    Raises:
        SpecError: As for `gradient_square`, or there are fewer steps than blocks.
    """
    batches = {"small_batch": small_batch, "large_batch": large_batch}
    square = gradient_square(small_square, large_square, **batches)
    trace = gradient_trace(small_square, large_square, **batches)
    steps = square.shape[-1]
    if not 2 <= blocks <= steps:
        raise SpecError(f"blocks={blocks} is not possible with {steps} steps; use 2 to {steps}")
    size = steps // blocks
    x, y = (v[..., -size * blocks :].reshape(*v.shape[:-1], blocks, size).mean(-1) for v in (square, trace))
    dx, dy = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    xx, yy, xy = ((d * e).sum(-1) / (blocks * (blocks - 1)) for d, e in ((dx, dx), (dy, dy), (dx, dy)))
    return _ratio(_Moments(square.mean(-1), trace.mean(-1), xx, yy, xy, np.asarray(blocks - 1.0)))


def track(
    small_square: ArrayLike,
    large_square: ArrayLike,
    *,
    small_batch: float,
    large_batch: float,
    smoothing: float = 0.99,
) -> NoiseEstimate:
    """Estimate the noise scale at every step (the last axis), from exponential moving averages of the steps up to it.

    The averages have no start-up bias: over the first steps they are plain means. An average with weights w counts as
    ``(sum w)^2 / sum w^2`` steps for its variance and for the confidence interval, which uses Fieller's theorem (1954).

    Args:
        small_square: Squared norms over `small_batch` samples, step by step.
        large_square: Squared norms over `large_batch` samples, step by step.
        small_batch: Smaller batch, in samples.
        large_batch: Larger batch, in samples.
        smoothing: Decay of a step's weight with each later step, 0 < value < 1; 0.99 averages over about 100 steps.

    Raises:
        SpecError: As for `gradient_square`, or `smoothing` is out of range.
    """
    if not 0 < smoothing < 1:
        raise SpecError(
            f"smoothing={smoothing!r} must be above 0 and below 1; 0.99 looks back over 100 steps"
        )
    batches = {"small_batch": small_batch, "large_batch": large_batch}
    square = np.moveaxis(gradient_square(small_square, large_square, **batches), -1, 0)
    trace = np.moveaxis(gradient_trace(small_square, large_square, **batches), -1, 0)
    rows = _moving(square, trace, smoothing)
    return _ratio(_Moments(*(np.moveaxis(row, 0, -1) for row in rows)))


class _Moments(NamedTuple):
    """Means of |G|^2 and tr(Sigma), variances and covariance of these means, and their degrees of freedom."""

    square: Floats
    trace: Floats
    xx: Floats
    yy: Floats
    xy: Floats
    freedom: Floats


def _moving(x: Floats, y: Floats, keep: float) -> Floats:
    """Compute the fields of `_Moments`, as rows, from moving averages along the first axis.

    West 1979: means and squares of deviations are updated together, so there is no cancellation.
    """
    rows = np.zeros((6, *x.shape))
    mean_x = mean_y = xx = yy = xy = np.zeros(x.shape[1:])
    weight = squares = 0.0
    for i, (xi, yi) in enumerate(zip(x, y, strict=True)):
        weight, squares = keep * weight + 1, keep**2 * squares + 1
        dx, dy = xi - mean_x, yi - mean_y
        mean_x, mean_y = mean_x + dx / weight, mean_y + dy / weight
        xx, yy, xy = (
            keep * old + new
            for old, new in ((xx, dx * (xi - mean_x)), (yy, dy * (yi - mean_y)), (xy, dx * (yi - mean_y)))
        )
        freedom = weight**2 / squares - 1
        share = 1 / (weight * freedom) if freedom > 1e-9 else np.inf
        with np.errstate(invalid="ignore"):
            spread = [np.nan_to_num(v * share, nan=np.inf) for v in (xx, yy, xy)]
        rows[:, i] = np.broadcast_arrays(mean_x, mean_y, *spread, freedom)
    return rows


def _ratio(moments: _Moments) -> NoiseEstimate:
    """Return ``trace / square`` with its confidence interval.

    The roots are those of the inverse ratio, whose denominator, unlike |G|^2, is never near 0.
    """
    square, trace, xx, yy, xy, freedom = moments
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        t2 = _quantile(freedom) ** 2
        a, b, c = trace**2 - t2 * yy, square * trace - t2 * xy, square**2 - t2 * xx
        known = (a > 0) & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
        root = np.sqrt(np.maximum(b * b - a * c, 0.0))
        least = np.where(known, (b - root) / a, -np.inf)
        most = np.where(known, (b + root) / a, np.inf)
        critical = np.where(square > 0, np.maximum(trace, 0.0) / square, np.inf)
        low = np.where(most > 0, 1 / most, np.inf)
        high = np.where(least > 0, 1 / least, np.inf)
    return NoiseEstimate(square, trace, critical, low, high)


def _quantile(freedom: Floats) -> Floats:
    """Quantile of Student's t distribution for a 95 % confidence interval.

    Abramowitz and Stegun 26.7.5; accurate within 1 % from 3 degrees of freedom.
    """
    z, nu = _NORMAL_QUANTILE, np.maximum(freedom, 1e-9)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return np.asarray(z + first / nu + second / nu**2 + third / nu**3)


# Cost of a batch size: the hyperbola that relates steps and examples.


def steps_to_target(batch: ArrayLike, *, min_steps: ArrayLike, critical_batch: ArrayLike) -> Floats:
    """``min_steps (1 + critical_batch / batch)``: steps to reach a given loss (equation 2.11 with E = B S there).

    Args:
        batch: Batch size, in samples.
        min_steps: Number of steps in the limit of an infinite batch.
        critical_batch: Critical batch size, in samples.

    Raises:
        SpecError: A value is not above 0.
    """
    ratio = positive("critical_batch", critical_batch) / positive("batch", batch)
    return np.asarray(positive("min_steps", min_steps) * (1 + ratio))


def examples_to_target(batch: ArrayLike, *, min_examples: ArrayLike, critical_batch: ArrayLike) -> Floats:
    """``min_examples (1 + batch / critical_batch)``: number of samples to reach a given loss.

    Args:
        batch: Batch size, in samples.
        min_examples: Number of samples in the limit of a batch of 0.
        critical_batch: Critical batch size, in samples.

    Raises:
        SpecError: A value is not above 0.
    """
    ratio = positive("batch", batch) / positive("critical_batch", critical_batch)
    return np.asarray(positive("min_examples", min_examples) * (1 + ratio))


def examples_at(steps: ArrayLike, *, min_steps: ArrayLike, min_examples: ArrayLike) -> Floats:
    """Samples E needed to reach a given loss in S steps: ``(S/S_min - 1) (E/E_min - 1) = 1`` (equation 2.11 there).

    The critical batch size of this hyperbola is ``min_examples / min_steps``, where both are twice their minimum.

    Raises:
        SpecError: A value is not above 0, or `steps` is not above `min_steps`.
    """
    excess = positive("steps", steps) / positive("min_steps", min_steps) - 1
    if not (excess > 0).all():
        raise SpecError(
            f"steps={steps!r} must be above min_steps={min_steps!r}; no batch is large enough for fewer"
        )
    return np.asarray(positive("min_examples", min_examples) * (1 + 1 / excess))
