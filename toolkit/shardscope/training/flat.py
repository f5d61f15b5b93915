"""Many tensors in one flat one, so that they travel as one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of `flat` that hold tensors of these shapes, one after another; views."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


def copy_tensors_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy the values of each source into its target, of the same shape, unseen by autograd."""
    with torch.no_grad():
        torch._foreach_copy_(list(targets), list(sources))
