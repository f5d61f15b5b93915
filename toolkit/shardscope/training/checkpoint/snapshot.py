"""Copies of a rank's pieces in host memory, from which a checkpoint is written while training changes the originals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardscope.training.checkpoint.pieces import HeldPiece


@dataclass
class HostCopies:
    """Buffers in host memory, reused by every snapshot; page-locked if they are copied from a GPU.

    A snapshot overwrites the previous one.
    """

    _buffers: dict[str, Tensor] = field(default_factory=dict)

    def take(self, tensors: Mapping[str, HeldPiece]) -> tuple[dict[str, HeldPiece], Callable[[], None]]:
        """Copy pieces, by the names of their tensors.

        Copies from a GPU may still be in progress when this returns. Later changes on the same stream come after them.

        Returns:
            The copies, and a function that waits until they can be read.
        """
        copies = {key: replace(held, tensor=self._copied(key, held.tensor)) for key, held in tensors.items()}
        self._buffers = {key: copy.tensor for key, copy in copies.items()}
        if any(held.tensor.is_cuda for held in tensors.values()):
            copied = torch.cuda.Event()
            copied.record()
            return copies, copied.synchronize
        return copies, lambda: None

    def _copied(self, key: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)
