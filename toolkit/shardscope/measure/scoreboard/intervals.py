"""How good intervals are: a test of their coverage, and a score that rewards narrow intervals and punishes misses."""

from __future__ import annotations

from math import comb

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.9
"""Share of measurements that intervals are meant to contain."""
Z = 1.645
"""Half width of an interval that contains 90 % of a normal distribution, in standard deviations."""
ENOUGH = 20
"""Fewest rows for which a table's coverage is tested at 5 %. The test of 20 rows mainly finds intervals that are far
too narrow: those that really contain 70 % of measured times are rejected with a probability of 76 %, and those that
contain 80 % with 37 %. Intervals that are too wide are never rejected, which takes 34 rows."""
_SAME = 1 + 1e-7


def coverage_p_value(inside: int, rows: int) -> float:
    """Return the p-value of the two-sided exact binomial test that intervals contain 90 % of measurements.

    It is the probability of all counts that are at most as likely as the given one (Clopper and Pearson's exact
    distribution, as in R's binom.test). Rows of one table share the same unknown constants, so their misses are
    correlated and the true p-value is larger.

    Example:
        >>> round(coverage_p_value(14, 20), 3)
        0.011
    """
    likely = [comb(rows, k) * LEVEL**k * (1 - LEVEL) ** (rows - k) for k in range(rows + 1)]
    return float(min(1.0, sum(p for p in likely if p <= likely[inside] * _SAME)))


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


def constant_half_width(tables: list[Floats]) -> float:
    """Return the half width, in logarithms, that contains 90 % of the deviations of all tables, weighted equally."""
    sizes = np.abs(np.concatenate(tables))
    weight = np.concatenate([np.full(len(each), 1 / len(each)) for each in tables])
    order = np.argsort(sizes)
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(sizes[order][np.searchsorted(reached, LEVEL - 1e-12)])
