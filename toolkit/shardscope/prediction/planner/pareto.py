"""Which layouts no other beats: faster or as fast, and with as much memory left.

Dollars need no axis of their own while the devices are the same for all: they go with the time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


def pareto_order(time: npt.ArrayLike, headroom: npt.ArrayLike) -> Indices:
    """Rows by time, then by headroom (most first), then as they came: nobody is beaten by one that comes later."""
    return np.lexsort((-np.asarray(headroom, float), np.asarray(time, float)))


def pareto_front(time: npt.ArrayLike, headroom: npt.ArrayLike) -> Indices:
    """Rows of the front, fastest first. Of equal rows only the first counts. O(n log n).

    Example:
        >>> pareto_front([3.0, 1.0, 2.0, 2.5], [9.0, 1.0, 5.0, 4.0]).tolist()
        [1, 2, 0]
    """
    order = pareto_order(time, headroom)
    return order[_leads(np.asarray(headroom, float)[order])]


def pareto_layers(
    time: npt.ArrayLike, headroom: npt.ArrayLike, count: int
) -> tuple[Indices, npt.NDArray[np.int64]]:
    """Rows of the first `count` fronts, each taken once those before it are gone, and the number of each's front.

    The best k rows by any measure that prefers less time and more headroom are among the first k fronts: each row that
    beats another sits in an earlier one.

    Returns:
        Rows in the order of `pareto_order`, and their fronts from 0.
    """
    left = pareto_order(time, headroom)
    room = np.asarray(headroom, float)[left]
    rows, fronts = [], []
    for front in range(count):
        if not len(left):
            break
        leads = _leads(room)
        rows.append(left[leads])
        fronts.append(np.full(len(rows[-1]), front))
        left, room = left[~leads], room[~leads]
    if not rows:
        return np.zeros(0, np.intp), np.zeros(0, np.int64)
    found, number = np.concatenate(rows), np.concatenate(fronts)
    order = pareto_order(np.asarray(time, float)[found], np.asarray(headroom, float)[found])
    return found[order], number[order]


def _leads(headroom: Floats) -> npt.NDArray[np.bool_]:
    """Of rows in order, those with more headroom than every row before."""
    before = np.concatenate(([-np.inf], np.maximum.accumulate(headroom)[:-1]))
    return np.asarray(headroom > before)


class Staircase:
    """The k-th front as a bar that a row has to pass: k others are faster and have as much headroom, or not."""

    def __init__(self, time: Floats, headroom: Floats) -> None:
        order = pareto_order(time, headroom)
        self._time, self._room = time[order], np.maximum.accumulate(headroom[order])

    def beats(self, time: Floats, headroom: Floats) -> npt.NDArray[np.bool_]:
        """Whether a row that is at least this slow, with at most this headroom, is surely beaten."""
        if not len(self._time):
            return np.zeros(len(time), bool)
        faster = np.searchsorted(self._time, time, side="left")
        best = np.where(faster > 0, self._room[np.maximum(faster - 1, 0)], -np.inf)
        return np.asarray(best >= headroom)
