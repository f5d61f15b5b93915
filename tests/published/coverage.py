"""Statistics of left-out tables: a test of the coverage of their intervals, and intervals of constant width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest

from published.one_step import LEVEL

ENOUGH = 20
"""Fewest rows for which the coverage of a table is tested."""
Floats = npt.NDArray[np.float64]


def coverage_p_value(inside: int, rows: int) -> float:
    """Return the p-value of the two-sided exact binomial test that intervals contain 90 % of measurements.

    Rows of one table share the same unknown constants, so their misses are correlated and the true p-value is larger.
    """
    return float(binomtest(inside, rows, LEVEL).pvalue)


def constant_half_width(tables: Sequence[Floats]) -> float:
    """Return the half width, in logarithms, that contains 90 % of the deviations of all tables, weighted equally."""
    sizes = np.abs(np.concatenate(tables))
    weight = np.concatenate([np.full(len(each), 1 / len(each)) for each in tables])
    order = np.argsort(sizes)
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(sizes[order][np.searchsorted(reached, LEVEL - 1e-12)])
