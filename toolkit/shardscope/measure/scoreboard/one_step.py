"""What one measured step of a table says about its other rows, and how often intervals contain measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardscope.measure.scoreboard.rows import Row, predicted_seconds
from shardscope.prediction.spread import Floats, covariance_of, slopes
from shardscope.spec.calibration import Calibration
from shardscope.spec.effects import row_noise

_Z = 1.645
"""Half width of an interval that contains 90 % of a normal distribution, in standard deviations."""


class OneStep(NamedTuple):
    """Errors of a table's rows before and after each of its rows has been measured in turn, in per cent."""

    covered: float
    """Share of measured times inside the 90 % interval."""
    after: float
    """MAPE of the other rows after one row was measured: the median over which one; NaN for a single row."""
    covered_after: float
    """Share of the other rows inside their intervals, the mean over which row was measured; NaN for a single row."""

    @classmethod
    def of(cls, rows: Sequence[Row], calibration: Calibration) -> OneStep:
        """Return the errors of rows that a calibration predicts."""
        predicted, slope = slopes(lambda moved: predicted_seconds(rows, moved), calibration)
        off = np.log([row.seconds for row in rows]) - predicted
        low, high = (np.log(calibration.quantiles[level]) for level in ("5", "95"))
        return after_one(slope, off, covariance_of(calibration), noise=row_noise(), low=low, high=high)


def after_one(
    slope: Floats,
    off: Floats,
    covariance: Floats,
    *,
    noise: float,
    low: float | None = None,
    high: float | None = None,
) -> OneStep:
    """Return the errors before and after each row was measured; `ss.calibrate` with one row is linear here.

    Args:
        slope: Derivatives of the logarithms of predicted times, shape `(rows, factors)`.
        off: log(measured / predicted) of each row.
        covariance: Covariance of the factors.
        noise: Standard deviation of a row's own deviation.
        low: Lower end of the interval on one cluster, in logarithms; None for that of `noise`.
        high: Its upper end.
    """
    within = _Z * noise
    low, high = (-within if low is None else low), (within if high is None else high)
    between = _Z * np.sqrt(np.maximum(np.einsum("ri,ij,rj->r", slope, covariance, slope), 0.0))
    covered = 100 * _inside(off, between, low, high)
    turns = [
        turn for row in range(len(off)) if (turn := _turn(slope, off, covariance, row, noise)) is not None
    ]
    if not turns:
        return OneStep(covered, float("nan"), float("nan"))
    mapes, shares = zip(*turns, strict=True)
    return OneStep(covered, float(np.median(mapes)), 100 * float(np.mean(shares)))


def _turn(
    slope: Floats, off: Floats, covariance: Floats, row: int, noise: float
) -> tuple[float, float] | None:
    rest = np.arange(len(off)) != row
    if not rest.any():
        return None
    variance = slope[row] @ covariance @ slope[row] + noise**2
    gain = covariance @ slope[row] / variance
    left = off[rest] - slope[rest] @ (gain * off[row])
    kept = covariance - np.outer(gain, slope[row] @ covariance)
    spread = np.sqrt(np.maximum(np.einsum("ri,ij,rj->r", slope[rest], kept, slope[rest]), 0.0))
    return 100 * float(np.abs(np.expm1(-left)).mean()), _inside(left, _Z * spread, -_Z * noise, _Z * noise)


def _inside(off: Floats, between: Floats, low: float, high: float) -> float:
    return float(np.mean((off >= -np.hypot(low, between)) & (off <= np.hypot(high, between))))
