"""Orthonormalise small sets of long vectors, deterministically, so that ranks with equal input get equal results.

Vectors are stored as rows, so that each vector is contiguous. Sets of equal shape are processed together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_DEPENDENT = 1e-10
"""A vector counts as linearly dependent if less than this fraction of its norm remains after its projection onto
earlier vectors is removed. The value is far below the rounding error of float32, and far above that of float64."""


def orthonormalize_(sets: Sequence[Tensor]) -> None:
    """Make the rows of every ``[rank, length]`` set orthonormal, in place; the span of the first k rows stays the same.

    Each row is orthogonalised twice by Gram-Schmidt in float64, which leaves only rounding errors (Giraud et al. 2005).
    A row that depends linearly on earlier rows becomes zero, and a zero row stays zero; nothing is divided by zero.
    """
    _together(sets, _gram_schmidt)


def unit_rows_(sets: Sequence[Tensor]) -> None:
    """Scale every row of every ``[rank, length]`` matrix to unit norm, in place; rows of zeros stay zero."""
    _together(sets, lambda stack: stack * _inverse(stack.norm(dim=-1, keepdim=True)))


def _together(sets: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
    groups: dict[torch.Size, list[Tensor]] = {}
    for rows in sets:
        groups.setdefault(rows.shape, []).append(rows)
    for group in groups.values():
        for rows, result in zip(group, function(torch.stack(group).double()), strict=True):
            rows.copy_(result)


def _gram_schmidt(stack: Tensor) -> Tensor:
    for k in range(stack.shape[1]):
        row, earlier = stack[:, k : k + 1], stack[:, :k]
        size = row.norm(dim=-1, keepdim=True)
        for _ in range(2 if k else 0):
            row -= (row @ earlier.mT) @ earlier
        left = row.norm(dim=-1, keepdim=True)
        row *= torch.where(left > _DEPENDENT * size, _inverse(left), 0.0)
    return stack


def _inverse(norms: Tensor) -> Tensor:
    return torch.where(norms > 0, norms.reciprocal(), 0.0)
