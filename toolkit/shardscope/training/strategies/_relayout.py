"""A flat gradient as FSDP2 lays it out for so many ranks, and for another number of them.

Rank r's chunk holds rows [r k, (r+1) k) of every parameter of the unit, k being a W-th of its rows, rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def relayout(flat: Tensor, shapes: Sequence[torch.Size], old: int, new: int) -> Tensor:
    """What lies in `flat` for `old` ranks as it lies for `new` ones; padding is zero.

    Args:
        flat: One-dimensional; all chunks one after another.
        shapes: Of the unit's parameters, in their order; none is a scalar.
        old: Ranks that `flat` is laid out for.
        new: Ranks to lay it out for.
    """
    wholes, table, column = [], flat.view(old, -1), 0
    for shape in shapes:
        width = _chunk(shape, old)
        wholes.append(table[:, column : column + width].reshape(-1)[: shape.numel()])
        column += width
    return torch.cat([_padded(whole, _chunk(shape, new) * new).view(new, -1)
                      for whole, shape in zip(wholes, shapes, strict=True)], dim=1).view(-1)  # fmt: skip


def _chunk(shape: torch.Size, ranks: int) -> int:
    """Elements of a parameter in one rank's chunk, padding included."""
    return -(-shape[0] // ranks) * shape[1:].numel()


def _padded(whole: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(whole, (0, size - whole.numel()))
