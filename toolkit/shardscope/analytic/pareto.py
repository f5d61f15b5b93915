"""Pareto fronts: the rows of a table of costs that no other row dominates, for trials, members and layouts.

Every column is a cost; lower is better. A row dominates another if it is higher in no column and lower in at least one
(Deb et al. 2002, NSGA-II, section III.A). Equal rows share a front. With `in_turn`, the first of them dominates the
others, for callers that need only one of them. A NaN is not comparable: its row neither dominates nor is dominated. The
caller leaves out rows that break a constraint.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


def dominates(one: npt.ArrayLike, other: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Whether rows of `one` dominate rows of `other`; all axes but the last, the costs, follow NumPy broadcasting."""
    one, other = np.asarray(one, float), np.asarray(other, float)
    return np.asarray((one <= other).all(axis=-1) & (one < other).any(axis=-1))


def front(costs: npt.ArrayLike, *, in_turn: bool = False) -> Indices:
    """Return the indices of the Pareto-optimal rows, in table order.

    Example:
        >>> front([[3.0, -9.0], [1.0, -1.0], [2.0, -5.0], [2.5, -4.0]]).tolist()
        [0, 1, 2]
    """
    return np.flatnonzero(front_numbers(costs, count=1, in_turn=in_turn) == 0)


def front_numbers(costs: npt.ArrayLike, *, count: int | None = None, in_turn: bool = False) -> Indices:
    """Return the front number of each row; each front is the Pareto front of the rows that earlier fronts leave over.

    Two columns take O(n log n + n count), any other number O(n²).

    Args:
        costs: Shape `(rows, columns)`.
        count: Number of fronts to find; all remaining rows get this number. None finds all fronts.
        in_turn: Whether equal rows are put on successive fronts, in table order, instead of sharing one.
    """
    columns = np.ascontiguousarray(np.asarray(costs, float).T)
    if not columns.size:
        return np.zeros(len(np.asarray(costs)), np.intp)
    order = lexical_order(columns.T)
    columns = columns.take(order, axis=1)
    first = np.ones(len(order), bool)
    if not in_turn:
        first[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        columns = columns[:, first]
    most = len(order) if count is None else count
    found = _sweep(columns[0], columns[1], most) if len(columns) == 2 else np.minimum(_chains(columns), most)
    numbers = np.empty(len(order), np.intp)
    numbers[order] = found if in_turn else found[np.cumsum(first) - 1]
    return numbers


def lexical_order(costs: npt.ArrayLike) -> Indices:
    """Return row indices sorted stably by the first cost, then the second, and so on.

    In this order, no row is dominated by a later one.
    """
    columns = np.asarray(costs, float).T
    return np.lexsort(columns[::-1]) if columns.size else np.arange(len(np.asarray(costs)))


def _sweep(x: Floats, y: Floats, count: int) -> Indices:
    """Front numbers of sorted rows with two costs: a front is the rows whose second cost is below all earlier ones."""
    numbers, left = np.full(len(x), count), np.arange(len(x))
    y = np.where(np.isnan(x), x, y)
    for number in range(count):
        if not len(left):
            break
        leads = np.ones(len(left), bool)
        leads[1:] = ~(y[1:] >= np.fmin.accumulate(y)[:-1])
        numbers[left[leads]] = number
        left, y = left[~leads], y[~leads]
    return numbers


def _chains(columns: Floats) -> Indices:
    """Front numbers of sorted rows: the length of the longest chain of dominating rows that ends at each."""
    numbers = np.zeros(columns.shape[1], np.intp)
    for row in range(1, len(numbers)):
        above = (columns[:, :row] <= columns[:, row, None]).all(axis=0)
        numbers[row] = numbers[:row].max(initial=-1, where=above) + 1
    return numbers
