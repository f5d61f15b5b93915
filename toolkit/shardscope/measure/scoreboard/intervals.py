"""How good intervals are: a score that rewards narrow intervals and punishes misses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.9
"""Share of measurements that intervals are meant to contain."""
Z = 1.645
"""Half width of an interval that contains 90 % of a normal distribution, in standard deviations."""


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
