"""Many rows with few different values: work once for each combination that occurs, then look it up.

A search through a million layouts has a million rows, but tensor degree, micro-batch and their like together take only
some thousand combinations. What depends on them alone is computed for those.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Distinct(NamedTuple):
    """The combinations of some columns that occur, and for each row which of them it is."""

    columns: tuple[Ints, ...]
    row: npt.NDArray[np.intp]

    @classmethod
    def of(cls, *columns: npt.ArrayLike) -> Distinct:
        """Of columns of non-negative integers of one length."""
        given = [np.asarray(column) for column in columns]
        if len(given[0]) < 256:
            return cls(tuple(np.asarray(column, np.int64) for column in given), np.arange(len(given[0])))
        key, sizes, values = np.zeros(len(given[0]), np.int32), [], []
        for column in given:
            known, rank = _ranked(column)
            key *= np.int32(len(known))
            key += rank
            sizes.append(len(known))
            values.append(known)
        if np.prod([float(size) for size in sizes]) > 2**31 - 1:
            return cls._by_sorting(given)
        seen = np.bincount(key, minlength=int(np.prod(sizes)))
        present = np.flatnonzero(seen)
        place = np.zeros(len(seen), np.intp)
        place[present] = np.arange(len(present))
        parts = np.unravel_index(present, sizes)
        return cls(tuple(known[part] for known, part in zip(values, parts, strict=True)), place.take(key))

    @classmethod
    def _by_sorting(cls, columns: list[npt.NDArray[np.int64]]) -> Distinct:
        rows, inverse = np.unique(np.stack(columns), axis=1, return_inverse=True)
        return cls(tuple(rows), inverse.ravel())


def _ranked(column: npt.NDArray[np.int64]) -> tuple[Ints, npt.NDArray[np.int32]]:
    """The values that occur, sorted, and the rank of each row's among them."""
    if (column == column[0]).all():
        return np.array([column[0]], np.int64), np.zeros(len(column), np.int32)
    if column.max() > 1 << 20:
        known, rank = np.unique(column, return_inverse=True)
        return known, rank.astype(np.int32)
    known = np.flatnonzero(np.bincount(column))
    place = np.zeros(known[-1] + 1, np.int32)
    place[known] = np.arange(len(known), dtype=np.int32)
    return known, place.take(column)
