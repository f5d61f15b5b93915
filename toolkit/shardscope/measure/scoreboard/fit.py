"""Fit a machine's constants to measured rows: robust least squares on the logarithm of predicted / measured.

Every constant has a prior, log-normal about what such machines usually show, so that what the rows cannot tell stays
where it was instead of wandering off. Large residuals count linearly (soft L1): two odd runs do not bend the rest.

Whoever ships a calibration fits it; predictions and the scoreboard only read it, and need no scipy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.errors import ShardscopeError
from shardscope.measure.scoreboard.rows import Row, predicted_seconds
from shardscope.spec.calibration import Calibration

Floats = npt.NDArray[np.float64]

NOISE = 0.05
"""Residuals (in logarithms) beyond this count linearly."""
LARGEST_SHARE = 0.98


class Prior(NamedTuple):
    """Where a constant usually lies, and how far from it in logarithms."""

    center: float
    spread: float


Priors = Mapping[str, Prior]


def fit(
    rows: Sequence[Row], priors: Priors, start: Calibration, *, weights: Mapping[str, float] | None = None
) -> Calibration:
    """`start` with the constants of `priors` fitted to the rows.

    Args:
        rows: What was measured.
        priors: Of the constants to fit, by the name of their field.
        start: Where all other fields come from.
        weights: Of one row, by data set; 1 where it is not named.

    Raises:
        ShardscopeError: scipy is not installed.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise ShardscopeError(
            "fitting a calibration needs the package scipy; pip install 'shardscope[calibrate]'"
        ) from error
    measured = np.log([row.seconds for row in rows])
    scale = np.sqrt([(weights or {}).get(row.dataset, 1.0) for row in rows])
    spread = np.array([prior.spread for prior in priors.values()])

    def residuals(at: Floats) -> Floats:
        off = np.log(predicted_seconds(rows, _calibration(start, priors, at))) - measured
        return np.concatenate([_soft(off / NOISE) * scale, at / spread])

    found = least_squares(
        residuals, np.zeros(len(priors)), diff_step=1e-4, max_nfev=60, bounds=_bounds(priors)
    )
    return _calibration(start, priors, found.x)


def _soft(residuals: Floats) -> Floats:
    """Residuals whose squares grow like soft L1: 2 (sqrt(1 + r²) - 1)."""
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
