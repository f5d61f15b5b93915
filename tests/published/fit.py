"""Fit a machine's constants to measured rows: robust least squares on the logarithm of predicted / measured.

Every constant has a log-normal prior around the usual value of such machines, so that constants which the rows cannot
determine stay near it. Large residuals count linearly (soft L1), so that a few outliers do not distort the fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from shardscope.calibration.calibration import Calibration
from shardscope.measure.calibrate.rows import Row, RowGroups

Floats = npt.NDArray[np.float64]

NOISE = 0.05
"""Residuals (in logarithms) beyond this count linearly."""
LARGEST_SHARE = 0.98


class Prior(NamedTuple):
    """Usual value of a constant, and its spread in logarithms."""

    center: float
    spread: float


Priors = Mapping[str, Prior]


def fit(
    rows: Sequence[Row], priors: Priors, start: Calibration, *, weights: Mapping[str, float] | None = None
) -> Calibration:
    """Return `start` with the constants of `priors` fitted to the rows.

    Args:
        rows: The measured rows.
        priors: Priors of the constants to fit, by field name.
        start: Calibration with the values of all other fields.
        weights: Weight of one row, by data set; 1 if the data set is not listed.
    """
    measured, tables = np.log([row.seconds for row in rows]), RowGroups.of(rows)
    scale = np.sqrt([(weights or {}).get(row.dataset, 1.0) for row in rows])
    spread = np.array([prior.spread for prior in priors.values()])

    def residuals(at: Floats) -> Floats:
        off = np.log(tables.seconds(_calibration(start, priors, at))) - measured
        return np.concatenate([_soft(off / NOISE) * scale, at / spread])

    found = least_squares(
        residuals, np.zeros(len(priors)), diff_step=1e-4, max_nfev=60, bounds=_bounds(priors)
    )
    return _calibration(start, priors, found.x)


def _soft(residuals: Floats) -> Floats:
    """Residuals transformed so that their squares are the soft L1 loss: 2 (sqrt(1 + r²) - 1)."""
    grown = 2 * (np.sqrt(1 + residuals**2) - 1)
    return np.asarray(np.sign(residuals) * np.sqrt(grown))


def _calibration(start: Calibration, priors: Priors, at: Floats) -> Calibration:
    constants = {
        name: float(f"{prior.center * np.exp(step):.17g}")
        for (name, prior), step in zip(priors.items(), at, strict=True)
    }
    return start.model_copy(update=constants)


def _bounds(priors: Priors) -> tuple[list[float], list[float]]:
    shares = ("efficiency", "overlap")
    upper = [
        float(np.log(LARGEST_SHARE / prior.center)) if name.endswith(shares) else 9.0
        for name, prior in priors.items()
    ]
    return [-9.0] * len(priors), upper
