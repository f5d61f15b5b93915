"""Fit the knots to measured step times and parts: robust least squares with a prior, by damped Gauss-Newton steps.

The residual of a step time is relative, since what counts is the relative error of predictions; that of a part is
relative to the part and the step, since a small part need not be exact. The loss is Cauchy's, so that runs that another
program disturbed hardly count. Such a loss has several minima; so the fit begins with wide deviations, for which there
is one, and narrows them (graduated non-convexity, Blake and Zisserman 1987).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardscope.measure.calibrate.design import Design, Floats
from shardscope.measure.calibrate.observed import PARTS, Observed

_STEP, _PART, _PART_OF_STEP = 0.08, 0.15, 0.05
"""Standard deviations: of the logarithm of a step time, and of a part, relative to itself and to the step."""
_CAUCHY = 1.5
"""Residual, in standard deviations, at which a run counts half."""
_SPREADS = (16.0, 4.0, 1.0)
"""Factors of `_CAUCHY`, one after the other."""
_MOST_STEPS = 60


@dataclass(frozen=True)
class Measured:
    """Measured seconds of several runs: of steps, `(runs,)`, and of their parts, `(runs, parts)`, NaN if unknown."""

    step: Floats
    parts: Floats

    @classmethod
    def of(cls, rows: Sequence[Observed]) -> Measured:
        """Gather the measurements of runs."""
        parts = [[row.parts.get(name, 0.0) if row.parts else np.nan for name in PARTS[:-1]] for row in rows]
        return cls(np.array([row.step_s for row in rows]), np.array(parts))


@dataclass(frozen=True)
class Prior:
    """Expected logarithms of the knots, and their standard deviations; shape `(knots,)`."""

    mean: Floats
    deviation: Floats


def fit(
    design: Design,
    measured: Measured,
    prior: Prior,
    *,
    share: Floats | None = None,
    start: Floats | None = None,
) -> Floats:
    """Return the logarithms of the knots that fit best.

    Args:
        design: Predicted parts as a function of the knots.
        measured: Measured times of the same runs.
        prior: What is known of the knots beforehand.
        share: Weight of each run; None for 1.
        start: Where to start; None for the prior's mean.
    """
    each = np.ones(len(measured.step)) if share is None else share
    x: Floats = prior.mean if start is None else start
    for spread in _SPREADS if start is None else _SPREADS[-1:]:
        x = _minimum(design, measured, prior, share=each, x=x, scale=_CAUCHY * spread)
    return x


def _minimum(
    design: Design, measured: Measured, prior: Prior, *, share: Floats, x: Floats, scale: float
) -> Floats:
    """Return the minimum of the loss with this scale that is reached from x."""
    damping = 1e-3
    error, slope = _residuals(design, measured, x)
    loss = _loss(error, share, x, prior, scale)
    for _ in range(_MOST_STEPS):
        weight = share[:, None] / (1.0 + (error / scale) ** 2)
        normal = np.einsum("rpk,rp,rpl->kl", slope, weight, slope) + np.diag(prior.deviation**-2.0)
        gradient = np.einsum("rpk,rp->k", slope, weight * error) + (x - prior.mean) / prior.deviation**2
        for _ in range(8):
            change = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            change = np.clip(change, -1.0, 1.0)
            new_error, new_slope = _residuals(design, measured, x + change)
            new_loss = _loss(new_error, share, x + change, prior, scale)
            if new_loss <= loss:
                break
            damping *= 5.0
        else:
            return x
        x, error, slope, damping = x + change, new_error, new_slope, max(damping / 10.0, 1e-9)
        if loss - new_loss < 1e-6 * loss:
            return x
        loss = new_loss
    return x


def ratios(design: Design, measured: Measured, x: Floats) -> Floats:
    """Return measured / predicted step time of each run."""
    predicted, _ = design.parts(x)
    return np.asarray(measured.step / predicted.sum(axis=1), dtype=np.float64)


def _residuals(design: Design, measured: Measured, x: Floats) -> tuple[Floats, Floats]:
    """Return the residuals in standard deviations, `(runs, 1 + parts)`, and their derivatives with respect to x."""
    parts, slopes = design.parts(x)
    step, whole = parts.sum(axis=1), slopes.sum(axis=1)
    known = np.nan_to_num(measured.parts)
    deviation = _PART * known + _PART_OF_STEP * measured.step[:, None]
    deviation = np.where(np.isnan(measured.parts), np.inf, deviation)
    error = np.column_stack([np.log(step / measured.step) / _STEP, (parts[:, :-1] - known) / deviation])
    slope = np.concatenate(
        [(whole / step[:, None] / _STEP)[:, None], slopes[:, :-1] / deviation[:, :, None]], axis=1
    )
    return error, slope


def _loss(error: Floats, share: Floats, x: Floats, prior: Prior, scale: float) -> float:
    robust = scale**2 / 2 * np.log1p((error / scale) ** 2)
    return float((robust * share[:, None]).sum() + (((x - prior.mean) / prior.deviation) ** 2).sum() / 2)
