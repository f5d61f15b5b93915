"""The gradient noise scale: an estimate of the batch size beyond which larger batches barely reduce the steps needed.

Let G be the gradient over all data and Sigma the covariance matrix of a single sample's gradient. Then the expected
squared norm of the mean gradient over B samples is ``E|g_B|^2 = |G|^2 + tr(Sigma) / B``. A data-parallel step provides
this norm for two batch sizes: for the gradient of one rank and for the mean gradient over all ranks. The two equations
determine |G|^2 and tr(Sigma). The ratio ``tr(Sigma) / |G|^2`` is the simple noise scale, an estimate of the critical
batch size.

Source: McCandlish, Kaplan, Amodei et al. 2018, An empirical model of large-batch training (arXiv 1812.06162), appendix
A.1, called "the paper" below.
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
"""The 97.5 % quantile of the standard normal distribution: 95 % of values are smaller in magnitude."""


def _check_batches(small_batch: ArrayLike, large_batch: ArrayLike) -> tuple[Floats, Floats]:
    small, large = positive("small_batch", small_batch), positive("large_batch", large_batch)
    if not (small < large).all():
        raise SpecError(
            f"small_batch={small_batch!r} must be below large_batch={large_batch!r}; give two different batch sizes, "
            "the smaller one first"
        )
    return small, large


def gradient_square(
    small_square: ArrayLike, large_square: ArrayLike, *, small_batch: ArrayLike, large_batch: ArrayLike
) -> Floats:
    """Return an unbiased estimate of |G|^2, the squared norm of the gradient over all data; it may be negative.

    The formula is ``(B L - b s) / (B - b)`` (appendix A.1 of the paper).

    Args:
        small_square: ``s``, the squared norm of a gradient over `small_batch` samples.
        large_square: ``L``, the squared norm of a gradient over `large_batch` samples.
        small_batch: ``b``, the smaller batch size, in samples.
        large_batch: ``B``, the larger batch size, in samples.

    Raises:
        SpecError: A batch size is not above 0, or `small_batch` is not below `large_batch`.
    """
    small, large = _check_batches(small_batch, large_batch)
    return np.asarray((large * np.asarray(large_square) - small * np.asarray(small_square)) / (large - small))


def gradient_trace(
    small_square: ArrayLike, large_square: ArrayLike, *, small_batch: ArrayLike, large_batch: ArrayLike
) -> Floats:
    """Return an unbiased estimate of tr(Sigma), the total variance of a single sample's gradient.

    The formula is ``(s - L) / (1/b - 1/B)`` (appendix A.1 of the paper). The arguments are the same as for
    `gradient_square`.

    Raises:
        SpecError: A batch size is not above 0, or `small_batch` is not below `large_batch`.
    """
    small, large = _check_batches(small_batch, large_batch)
    return np.asarray((np.asarray(small_square) - np.asarray(large_square)) / (1 / small - 1 / large))


@dataclass(frozen=True)
class NoiseEstimate:
    """Estimate of the noise scale, either for all steps together (`estimate`) or for each step (`track`).

    Attributes:
        gradient_square: |G|^2, averaged over steps.
        trace: tr(Sigma), averaged over steps.
        critical_batch: tr(Sigma) / |G|^2, the simple noise scale in samples; infinite if the mean |G|^2 is not above 0.
        low: Lower end of the 95 % confidence interval of `critical_batch`, in samples.
        high: Upper end of the interval, in samples; infinite if |G|^2 does not differ significantly from 0.
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
    """Estimate one noise scale from many steps, during which the model should change little.

    |G|^2 and tr(Sigma) are each averaged over the steps, and the averages are divided. The mean of the steps' ratios
    would be biased, because the estimate of |G|^2 from one step is often close to 0 or even negative (appendix A.1 of
    the paper). The confidence interval treats means over blocks of consecutive steps as independent, and uses Fieller's
    theorem (1954) for the ratio of two means.

    Args:
        small_square: Squared norms of gradients over `small_batch` samples; steps are along the last axis.
        large_square: Squared norms of gradients over `large_batch` samples; steps are along the last axis.
        small_batch: Smaller batch size, in samples.
        large_batch: Larger batch size, in samples.
        blocks: Number of blocks, at least 2 and at most the number of steps.

    Raises:
        SpecError: A batch size is not above 0, `small_batch` is not below `large_batch`, or `blocks` is out of range.
    """
    batches = {"small_batch": small_batch, "large_batch": large_batch}
    square = gradient_square(small_square, large_square, **batches)
    trace = gradient_trace(small_square, large_square, **batches)
    steps = square.shape[-1]
    if not 2 <= blocks <= steps:
        raise SpecError(f"blocks={blocks} is out of range for {steps} steps; use 2 to {steps}")
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
    """Estimate the noise scale at every step, from exponential moving averages over this and all earlier steps.

    The averages are corrected for start-up bias, so they are close to plain means over the first steps. Variances
    and the confidence interval are computed as if an average with weights w were the plain mean of
    ``(sum w)^2 / sum w^2`` steps. The interval uses Fieller's theorem (1954).

    Args:
        small_square: Squared norms of gradients over `small_batch` samples; steps are along the last axis.
        large_square: Squared norms of gradients over `large_batch` samples; steps are along the last axis.
        small_batch: Smaller batch size, in samples.
        large_batch: Larger batch size, in samples.
        smoothing: Factor by which a step's weight decays with each later step, between 0 and 1 (exclusive); 0.99
            averages over about 100 steps.

    Raises:
        SpecError: A batch size is not above 0, `small_batch` is not below `large_batch`, or `smoothing` is out of
            range.
    """
    if not 0 < smoothing < 1:
        raise SpecError(
            f"smoothing={smoothing!r} must be above 0 and below 1; use 0.99 to average over about 100 steps"
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
    """Variance of `square`."""
    yy: Floats
    """Variance of `trace`."""
    xy: Floats
    """Covariance of `square` and `trace`."""
    freedom: Floats


def _moving(x: Floats, y: Floats, keep: float) -> Floats:
    """Return the fields of `_Moments` as rows, computed from moving averages along the first axis.

    Means and sums of squared deviations are updated together, which avoids cancellation (West 1979).

    Args:
        x: Estimates of |G|^2, step by step.
        y: Estimates of tr(Sigma), step by step.
        keep: Factor by which weights decay with each step.
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
    """Return the ratio ``trace / square`` with its confidence interval.

    The interval is computed for the inverse ratio, because its denominator `trace`, unlike `square`, is never near 0.
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
    """Return the quantile of Student's t distribution for a 95 % confidence interval.

    The approximation is accurate to 1 % for 3 or more degrees of freedom (Abramowitz and Stegun 26.7.5).
    """
    z, nu = _NORMAL_QUANTILE, np.maximum(freedom, 1e-9)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return np.asarray(z + first / nu + second / nu**2 + third / nu**3)


# The trade-off between steps and samples that a batch size sets: a hyperbola.


def steps_to_target(batch: ArrayLike, *, min_steps: ArrayLike, critical_batch: ArrayLike) -> Floats:
    """Return the number of steps needed to reach a given loss: ``min_steps (1 + critical_batch / batch)``.

    This is equation 2.11 of the paper, in which the number of samples E is the batch size times the number of steps.

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
    """Return the number of samples needed to reach a given loss: ``min_examples (1 + batch / critical_batch)``.

    Args:
        batch: Batch size, in samples.
        min_examples: Number of samples in the limit of batch size 0.
        critical_batch: Critical batch size, in samples.

    Raises:
        SpecError: A value is not above 0.
    """
    ratio = positive("batch", batch) / positive("critical_batch", critical_batch)
    return np.asarray(positive("min_examples", min_examples) * (1 + ratio))


def examples_at(steps: ArrayLike, *, min_steps: ArrayLike, min_examples: ArrayLike) -> Floats:
    """Return the number of samples E needed to reach a given loss in S steps.

    E and S are related by ``(S/S_min - 1) (E/E_min - 1) = 1`` (equation 2.11 of the paper). At the critical batch size,
    ``min_examples / min_steps``, both E and S are twice their minimum.

    Args:
        steps: S, the number of steps; must be above `min_steps`.
        min_steps: S_min, the number of steps in the limit of an infinite batch.
        min_examples: E_min, the number of samples in the limit of batch size 0.

    Raises:
        SpecError: A value is not above 0, or `steps` is not above `min_steps`.
    """
    excess = positive("steps", steps) / positive("min_steps", min_steps) - 1
    if not (excess > 0).all():
        raise SpecError(
            f"steps={steps!r} must be above min_steps={min_steps!r}, which only an infinite batch reaches"
        )
    return np.asarray(positive("min_examples", min_examples) * (1 + 1 / excess))
