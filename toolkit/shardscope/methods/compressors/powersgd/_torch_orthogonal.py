"""Small sets of long vectors made orthonormal: the same on every rank that holds the same numbers.

Vectors are rows, so that each lies in one piece. Sets of equal shape are worked on together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_DEPENDENT = 1e-10
"""What is left of a vector once its share in the earlier ones is gone, below which it counts as none of its own; far
under float32's rounding, far over float64's."""


def orthonormalize_(sets: Sequence[Tensor]) -> None:
    """Make the rows of every ``[rank, length]`` set orthonormal, in place, keeping the span of the first k for each k.

    Gram-Schmidt in float64, each row twice, which leaves rounding errors only (Giraud et al. 2005). A row that depends
    on the earlier ones becomes zero, as does one that is zero: nothing is divided by zero.
    """
    _together(sets, _gram_schmidt)


def unit_rows_(sets: Sequence[Tensor]) -> None:
    """Give every row of every ``[rank, length]`` set the norm 1, in place; rows of zeros stay."""
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
