"""What one measured step of a table says about its other rows, and how often intervals contain measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.calibration.calibration import Calibration
from shardscope.calibration.effects import fitted_noise, row_noise
from shardscope.calibration.spread import covariance_of, moved, shape_half_widths, slopes
from shardscope.measure.calibrate.rows import Row, RowGroups

Floats = npt.NDArray[np.float64]

LEVEL = 0.9
"""Share of measurements that intervals are meant to contain."""
Z = 1.645
"""Half width of an interval that contains 90 % of a normal distribution, in standard deviations."""
_TURNS = 3
"""Steps towards the factors that one row makes most likely; the last one hardly moves them."""


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
    """Mean interval score; see `interval_score`."""
    interval_score_after: float
    """The same of the other rows after one row was measured; the mean over which one."""

    @classmethod
    def of(cls, rows: Sequence[Row], calibration: Calibration) -> OneStep:
        """Return the errors of rows that a calibration predicts."""
        tables, measured = RowGroups.of(rows), np.log([row.seconds for row in rows])
        predicted, slope = slopes(tables.seconds, calibration)
        shape = shape_half_widths(tables.seconds, calibration)
        low, high = (np.hypot(np.log(calibration.quantiles[level]), shape) for level in ("5", "95"))

        def off_at(x: Floats) -> Floats:
            return np.asarray(measured - np.log(tables.seconds(moved(calibration, x))))

        def off_of_row(row: int, x: Floats) -> float:
            alone = RowGroups.of([rows[row]])
            return float(measured[row] - np.log(alone.seconds(moved(calibration, x))[0]))

        software = rows[0].software
        known = Known(
            slope, measured - predicted, covariance_of(calibration), fitted_noise(software), row_noise(software),
            off_at, off_of_row,
        )  # fmt: skip
        return known.after_one(low, high)


class Known(NamedTuple):
    """What is known of a table's rows before any of them was measured."""

    slope: Floats
    """Derivatives of the logarithms of predicted times, shape `(rows, factors)`."""
    off: Floats
    """log(measured / predicted) of each row."""
    covariance: Floats
    """Covariance of the factors."""
    noise: float
    """Standard deviation of a row's own deviation, by which a row moves the factors."""
    wide: float
    """The same, as intervals have it."""
    off_at: Callable[[Floats], Floats] | None = None
    """Function that returns `off` for other values of the factors; None if predictions are linear."""
    off_of_row: Callable[[int, Floats], float] | None = None
    """The same for one row, which takes less time than all rows; None to take it from those of all rows."""

    def after_one(self, low: float | Floats, high: float | Floats) -> OneStep:
        """Return the errors before and after each row was measured, in turn.

        Args:
            low: Lower end of the interval on one cluster, in logarithms; the same for all rows, or one for each.
            high: Its upper end.
        """
        before, turns = ends_of(self.slope, self.off, self.covariance, low, high), self.turns()
        if not turns:
            return OneStep(before.covered, float("nan"), float("nan"), before.score, float("nan"))
        return OneStep(
            before.covered,
            float(np.median([turn.mape for turn in turns])),
            float(np.mean([turn.covered for turn in turns])),
            before.score,
            float(np.mean([turn.score for turn in turns])),
        )

    def turns(self) -> list[Ends]:
        """Return the other rows after each row was measured, in turn; none for a single row.

        Factors move as `ss.calibrate` moves them by one row, but with the derivatives at the start.
        """
        return [self._turn(row) for row in range(len(self.off))] if len(self.off) > 1 else []

    def _turn(self, row: int) -> Ends:
        rest, covariance = np.arange(len(self.off)) != row, self.covariance
        variance = self.slope[row] @ covariance @ self.slope[row] + self.noise**2
        gain = covariance @ self.slope[row] / variance
        step = gain * self.off[row]
        left = self.off - self.slope @ step
        if self.off_at is not None:
            for _ in range(_TURNS):
                off = self.off_of_row(row, step) if self.off_of_row else self.off_at(step)[row]
                step = gain * (off + self.slope[row] @ step)
            left = self.off_at(step)
        kept = covariance - np.outer(gain, self.slope[row] @ covariance)
        # The measured row may be as far off as intervals say that rows are.
        kept += (self.wide**2 - self.noise**2) * np.outer(gain, gain)
        return ends_of(self.slope[rest], left[rest], kept, Z * self.wide, Z * self.wide)


def ends_of(
    slope: Floats, off: Floats, covariance: Floats, low: float | Floats, high: float | Floats
) -> Ends:
    """Return the intervals of rows, with `low` and `high` as those on one cluster."""
    between = Z * np.sqrt(np.maximum(np.einsum("ri,ij,rj->r", slope, covariance, slope), 0.0))
    return Ends(off, np.hypot(low, between), np.hypot(high, between))


def inside(off: Floats, low: Floats | float, high: Floats | float) -> npt.NDArray[np.bool_]:
    """Return which values lie between -low and high."""
    return np.asarray((off >= -np.asarray(low)) & (off <= np.asarray(high)))


def interval_score(off: Floats, low: Floats | float, high: Floats | float) -> float:
    """Return the mean interval score of 90 % intervals, in the unit of `off`; less is better.

    It is the width, plus 2 / 0.1 times the distance by which a value misses the interval (Winkler 1972; Gneiting and
    Raftery 2007, JASA 102, equation 43).

    Args:
        off: log(measured / predicted) of each row.
        low: Distance of the lower end from the prediction, in logarithms.
        high: Distance of the upper end.
    """
    missed = np.maximum(-np.asarray(low) - off, 0.0) + np.maximum(off - np.asarray(high), 0.0)
    return float(np.mean(np.asarray(low) + np.asarray(high) + 2 / (1 - LEVEL) * missed))
