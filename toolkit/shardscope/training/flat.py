"""Functions to pack many tensors into one flat tensor, which can be sent as one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split `flat` into consecutive views with the shapes of the tensors in `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


def copy_tensors_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to the target of the same shape at the same index; autograd does not record the copies."""
    with torch.no_grad():
        torch._foreach_copy_(list(targets), list(sources))
