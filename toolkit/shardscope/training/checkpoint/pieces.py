"""Pieces of tensors in checkpoints, and the reader that fills tensors from saved pieces.

A plain tensor is a single piece. A DTensor has one rectangular piece per rank: its shard. When loading, a rank copies
from every saved piece the part that overlaps with its own piece, so a checkpoint can be loaded on any number of ranks
and with any strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardscope.errors import CheckpointError
from shardscope.training import _compat
from shardscope.training.checkpoint.index import Damaged, Index, StoredBox, TensorEntry, open_plain
from shardscope.training.checkpoint.values import decode
from shardscope.training.optim.holding import bytes_of
from shardscope.training.sharding import TensorPart, local


def flat(state: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and values in nested dictionaries, each with its keys joined by dots."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


@dataclass(frozen=True)
class HeldPiece:
    """This rank's piece of a tensor.

    Attributes:
        tensor: Elements of the piece, on any device; a view of the original tensor.
        offsets: Offset of the piece in the whole tensor, in each dimension.
        whole: Shape of the whole tensor.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def all_of(cls, key: str, tensor: Tensor) -> list[HeldPiece]:
        """Return this rank's pieces of `tensor`: several of a `TensorPart`, one of a DTensor or any other tensor.

        Raises:
            CheckpointError: The tensor is sparse, quantized or on the meta device.
        """
        if isinstance(tensor, TensorPart):
            return [cls(view.detach(), offsets, tuple(tensor.shape)) for view, offsets in tensor.boxes]
        own = local(tensor.detach())
        if own.layout != torch.strided or own.is_quantized or own.device.type == "meta":
            raise CheckpointError(
                f"{key} is a {own.layout} tensor of {own.dtype} on {own.device}, which cannot be saved in a "
                "checkpoint; exclude it from the model's state with register_buffer(..., persistent=False)"
            )
        return [cls(own, _compat.offsets_of(tensor), tuple(tensor.shape))]

    def as_bytes(self) -> memoryview:
        """Return the bytes of the elements in row-major order."""
        return bytes_of(self.tensor).numpy().data if self.tensor.numel() else memoryview(b"")


@dataclass(frozen=True)
class CheckpointReader:
    """Reads the tensors and values of a checkpoint.

    Attributes:
        path: Folder of the checkpoint.
        index: Index of the checkpoint.
    """

    path: Path
    index: Index

    @property
    def keys(self) -> set[str]:
        """Names of all tensors and values in the checkpoint."""
        return {*self.index.tensors, *self.index.values}

    def fill(self, state: Mapping[str, Any], within: str = "") -> dict[str, Any]:
        """Return `state` with its values replaced by those in the checkpoint; tensors are overwritten in place.

        Raises:
            KeyError: An entry is missing from the checkpoint.
            ValueError: A tensor has a different shape in the checkpoint.
        """
        filled: dict[str, Any] = {}
        for name, held in state.items():
            key = f"{within}{name}"
            if isinstance(held, Mapping):
                filled[name] = self.fill(held, f"{key}.")
            elif isinstance(held, Tensor):
                self._fill(self.index.tensors[key], held, key)
                filled[name] = held
            else:
                filled[name] = decode(self.index.values[key])
        return filled

    def zeros(self, key: str) -> Tensor | None:
        """Return a tensor of zeros with the shape and dtype of the saved tensor `key`; None if it is not a tensor."""
        stored = self.described(key)
        return None if stored is None else torch.zeros(stored[0], dtype=stored[1])

    def described(self, key: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of the saved tensor `key`; None if it is not a tensor."""
        stored = self.index.tensors.get(key)
        return None if stored is None else (stored.shape, stored.format)

    def _fill(self, stored: TensorEntry, tensor: Tensor, key: str) -> None:
        if stored.shape != tuple(tensor.shape):
            raise ValueError(
                f"{key} has shape {_shape(stored.shape)} in the checkpoint, but {_shape(tuple(tensor.shape))} in the "
                "model"
            )
        own = HeldPiece.all_of(key, tensor)
        copied = sum(self._copy(stored, piece, held) for held in own for piece in stored.pieces)
        if copied != sum(held.tensor.numel() for held in own):
            raise Damaged(f"it does not contain every element of {key} exactly once")

    def _copy(self, stored: TensorEntry, piece: StoredBox, held: HeldPiece) -> int:
        """Copy the overlap of a saved piece with this rank's piece, and return the number of elements copied."""
        starts = [max(a, b) for a, b in zip(piece.offsets, held.offsets, strict=True)]
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(piece.offsets, piece.shape, held.offsets, held.tensor.shape, strict=True)
        ]
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return 0
        box = list(zip(starts, ends, strict=True))
        source = _within(self._read(stored, piece), box, piece.offsets)
        _within(held.tensor, box, held.offsets).copy_(source)
        return source.numel()

    def _read(self, stored: TensorEntry, piece: StoredBox) -> Tensor:
        size = stored.num_bytes(piece)
        with open_plain(self.path / piece.file) as file:
            data = np.fromfile(file, np.uint8, size, offset=piece.at)
        if len(data) != size:
            raise Damaged(f"{piece.file} is truncated")
        return torch.from_numpy(data).view(stored.format).reshape(piece.shape)


def _within(tensor: Tensor, box: list[tuple[int, int]], offsets: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(start - o, end - o) for (start, end), o in zip(box, offsets, strict=True))]


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
