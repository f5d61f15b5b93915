"""Fit the knots to measured step times and parts: robust least squares with a prior.

Residuals of step times are relative, because the relative error of predictions matters; residuals of parts are relative
to the part and the step, because small parts need not be exact. The loss is Cauchy's, so that runs disturbed by other
programs have little weight. A Cauchy loss has several minima, so the fit starts with a wide scale, for which there is
only one minimum, and narrows it (graduated non-convexity, Blake and Zisserman 1987).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardscope.measure.calibrate.design import Design, Floats
from shardscope.measure.calibrate.observed import PARTS, Observed
from shardscope.measure.calibrate.robust import minimum

_STEP, _PART, _PART_OF_STEP = 0.08, 0.15, 0.05
"""Standard deviations: of the logarithm of a step time, and of a part, relative to itself and to the step."""
_CAUCHY = 1.5
"""Residual, in standard deviations, at which a run has half the weight."""
_SPREADS = (16.0, 4.0, 1.0)
"""Factors of `_CAUCHY` in successive fits."""


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
        prior: Prior of the knots.
        share: Weight of each run; None for equal weights.
        start: Initial logarithms of the knots; None to start at the prior's mean.
    """

    def residuals(x: Floats) -> Floats:
        return _residuals(design, measured, x)[0].ravel()

    def slopes(x: Floats) -> Floats:
        return _residuals(design, measured, x)[1].reshape(-1, len(x))

    each = 1.0 if share is None else np.repeat(share, len(PARTS))
    x, root = prior.mean if start is None else start, np.diag(1 / prior.deviation)
    for spread in _SPREADS if start is None else _SPREADS[-1:]:
        x = minimum(residuals, slopes, x, mean=prior.mean, root=root, scale=_CAUCHY * spread, share=each)
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
