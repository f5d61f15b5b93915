"""Pareto fronts of a table of costs, such as those of trials, population members or layouts.

Every column is a cost, so lower is better. A row dominates another if it is higher in no column and lower in at least
one (Deb et al. 2002, NSGA-II, section III.A). The Pareto front consists of the rows that no other row dominates. Equal
rows are on the same front; with `in_turn`, the first of them counts as dominating the others, for callers that need
only one of them. A row with a NaN neither dominates other rows nor is dominated. Callers must leave out rows that
violate a constraint.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


def dominates(one: npt.ArrayLike, other: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return whether rows of `one` dominate rows of `other`.

    The last axis holds the costs of a row; all other axes are broadcast against each other.
    """
    one, other = np.asarray(one, float), np.asarray(other, float)
    return np.asarray((one <= other).all(axis=-1) & (one < other).any(axis=-1))


def front(costs: npt.ArrayLike, *, in_turn: bool = False) -> Indices:
    """Return the indices of the Pareto-optimal rows, in table order.

    Args:
        costs: Shape `(rows, columns)`.
        in_turn: Whether only the first of several equal rows is returned.

    Example:
        >>> front([[3.0, -9.0], [1.0, -1.0], [2.0, -5.0], [2.5, -4.0]]).tolist()
        [0, 1, 2]
    """
    return np.flatnonzero(front_numbers(costs, count=1, in_turn=in_turn) == 0)


def front_numbers(costs: npt.ArrayLike, *, count: int | None = None, in_turn: bool = False) -> Indices:
    """Return, for each row, the number of the front to which it belongs.

    Front 0 is the Pareto front of all rows, front 1 the Pareto front of the remaining rows, and so on. For n rows, the
    time is O(n log n + n count) with two columns and O(n²) with any other number.

    Args:
        costs: Shape `(rows, columns)`.
        count: Number of fronts to find; rows on later fronts get the number `count`. None finds all fronts.
        in_turn: Whether equal rows are put on successive fronts, in table order, instead of on the same front.
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
    """Return row indices in lexical order: sorted by the first cost, ties by the second, and so on.

    In this order, no row is dominated by a later one. Equal rows keep their order.
    """
    columns = np.asarray(costs, float).T
    return np.lexsort(columns[::-1]) if columns.size else np.arange(len(np.asarray(costs)))


def _sweep(x: Floats, y: Floats, count: int) -> Indices:
    """Return the front numbers of sorted rows with costs `x` and `y`.

    Each front consists of the remaining rows whose `y` is lower than the `y` of all remaining rows before them.
    """
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
    """Return the front numbers of sorted rows: for each row, the length of the longest chain that leads to it.

    In a chain, every row dominates the next one.
    """
    numbers = np.zeros(columns.shape[1], np.intp)
    for row in range(1, len(numbers)):
        above = (columns[:, :row] <= columns[:, row, None]).all(axis=0)
        numbers[row] = numbers[:row].max(initial=-1, where=above) + 1
    return numbers
