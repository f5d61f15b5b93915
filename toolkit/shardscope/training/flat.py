"""Many tensors in one flat tensor, so that they are sent as one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of consecutive parts of `flat` with the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


def copy_tensors_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy the values of each source into its target, of the same shape, without autograd."""
    with torch.no_grad():
        torch._foreach_copy_(list(targets), list(sources))
