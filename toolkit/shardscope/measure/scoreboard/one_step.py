"""What one measured step of a table says about its other rows, and how often intervals contain measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardscope.measure.scoreboard.intervals import Floats, Z, constant_half_width, inside, interval_score
from shardscope.measure.scoreboard.rows import Row, predicted_seconds
from shardscope.prediction.spread import covariance_of, slopes
from shardscope.spec.calibration import Calibration
from shardscope.spec.effects import row_noise


class Ends(NamedTuple):
    """Rows' deviations from predictions, and the distances of their intervals' ends, all in logarithms."""

    off: Floats
    low: Floats
    high: Floats

    @property
    def covered(self) -> float:
        """Share of rows inside their intervals, in per cent."""
        return 100 * float(np.mean(inside(*self)))

    @property
    def score(self) -> float:
        """Mean interval score, in per cent."""
        return 100 * interval_score(*self)

    @property
    def mape(self) -> float:
        """Mean of |predicted / measured - 1|, in per cent."""
        return 100 * float(np.abs(np.expm1(-self.off)).mean())


class OneStep(NamedTuple):
    """Errors of a table's rows before and after each of its rows has been measured in turn, in per cent."""

    covered: float
    """Share of measured times inside the 90 % interval."""
    after: float
    """MAPE of the other rows after one row was measured: the median over which one; NaN for a single row."""
    covered_after: float
    """Share of the other rows inside their intervals, the mean over which row was measured; NaN for a single row."""
    interval_score: float
    """Mean interval score; see `intervals.interval_score`."""
    interval_score_after: float
    """The same of the other rows after one row was measured; the mean over which one."""

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
    """Return the errors before and after each row was measured.

    Args:
        slope: Derivatives of the logarithms of predicted times, shape `(rows, factors)`.
        off: log(measured / predicted) of each row.
        covariance: Covariance of the factors.
        noise: Standard deviation of a row's own deviation.
        low: Lower end of the interval on one cluster, in logarithms; None for that of `noise`.
        high: Its upper end.
    """
    within = Z * noise
    before = ends_of(slope, off, covariance, within if low is None else low, within if high is None else high)
    turns = turns_of(slope, off, covariance, noise)
    if not turns:
        return OneStep(before.covered, float("nan"), float("nan"), before.score, float("nan"))
    return OneStep(
        before.covered,
        float(np.median([turn.mape for turn in turns])),
        float(np.mean([turn.covered for turn in turns])),
        before.score,
        float(np.mean([turn.score for turn in turns])),
    )


def ends_of(slope: Floats, off: Floats, covariance: Floats, low: float, high: float) -> Ends:
    """Return the intervals of rows, with `low` and `high` as those on one cluster."""
    between = Z * np.sqrt(np.maximum(np.einsum("ri,ij,rj->r", slope, covariance, slope), 0.0))
    return Ends(off, np.hypot(low, between), np.hypot(high, between))


def turns_of(slope: Floats, off: Floats, covariance: Floats, noise: float) -> list[Ends]:
    """Return the other rows after each row was measured, in turn; `ss.calibrate` with one row is linear here."""
    if len(off) < 2:
        return []
    return [_turn(slope, off, covariance, row, noise) for row in range(len(off))]


def _turn(slope: Floats, off: Floats, covariance: Floats, row: int, noise: float) -> Ends:
    rest = np.arange(len(off)) != row
    variance = slope[row] @ covariance @ slope[row] + noise**2
    gain = covariance @ slope[row] / variance
    left = off[rest] - slope[rest] @ (gain * off[row])
    kept = covariance - np.outer(gain, slope[row] @ covariance)
    return ends_of(slope[rest], left, kept, Z * noise, Z * noise)


def constant_scores(tables: Sequence[Sequence[Ends]]) -> list[float]:
    """Return the interval score of each table with a constant relative width, which 90 % of the other tables need.

    Args:
        tables: Rows of each table: once, or once for each row that was measured.
    """
    joined = [np.concatenate([turn.off for turn in turns]) for turns in tables]
    widths = [constant_half_width([*joined[:place], *joined[place + 1 :]]) for place in range(len(joined))]
    return [100 * interval_score(off, width, width) for off, width in zip(joined, widths, strict=True)]
