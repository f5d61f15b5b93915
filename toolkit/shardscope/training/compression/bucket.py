"""Buckets of gradients, which are compressed as one, and the tensors that a method keeps for them between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

PADDING = "padding"


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        names: Names of the tensors, in order: of parameters, or of a sharding unit.
        shapes: Shapes of the tensors. If a bucket boundary falls inside a tensor, its piece is flat.
        flat: All tensors, contiguous, one-dimensional, in CPU memory; exchanged in place.
        step: The current step, from 1.
        part: Index of this exchange within the step, from 0, if each micro-batch has its own exchange; otherwise 0.
    """

    names: Sequence[str]
    shapes: Sequence[torch.Size]
    flat: Tensor
    step: int
    part: int = 0

    @property
    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        return [shape.numel() for shape in self.shapes]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the tensors in `flat`, which is laid out like this bucket, by name."""
        pieces = flat.split(self.sizes)
        return {
            name: piece.view(shape)
            for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)
        }

    def cut(self, flat: Tensor, start: int) -> Bucket:
        """Bucket of `flat`, the part of this bucket from element `start` on; elements past its end are padding.

        A piece's name states where in its tensor it begins: ``name@start``.
        """
        names, sizes, at, stop = [], [], 0, start + flat.numel()
        for name, size in zip(self.names, self.sizes, strict=True):
            first, last = max(start, at), min(stop, at + size)
            if first < last:
                names.append(f"{name}@{first - at}")
                sizes.append(last - first)
            at += size
        if sum(sizes) < flat.numel():
            names.append(f"{self.names[0]}@{PADDING}")
            sizes.append(flat.numel() - sum(sizes))
        return Bucket(names, [torch.Size([size]) for size in sizes], flat, self.step, self.part)


def tensor_of(name: str) -> str:
    """Name of the tensor that contains a piece made by `Bucket.cut`; any other name is a tensor's own."""
    return name.partition("@")[0]


def squares_by_tensor(names: Sequence[str], pieces: Sequence[Tensor]) -> dict[str, float]:
    """Squared norms of pieces, summed per tensor; padding is left out."""
    squares: dict[str, float] = {}
    for name, piece in zip(names, pieces, strict=True):
        if not name.endswith(f"@{PADDING}"):
            wide = torch.promote_types(piece.dtype, torch.float32)
            norm = float(torch.linalg.vector_norm(piece, dtype=wide))
            squares[tensor_of(name)] = squares.get(tensor_of(name), 0.0) + norm**2
    return squares


@dataclass
class BucketState:
    """Flat float32 tensors kept from step to step, one per bucket, and by the names of the bucket's tensors.

    `DistributedDataParallel` rebuilds its buckets in the second step; the kept values move along, name by name.
    """

    _flats: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    _pieces: dict[str, Tensor] = field(default_factory=dict)

    def of(self, bucket: Bucket) -> Tensor:
        """The kept tensor of this bucket, laid out like it; zeros where nothing was kept."""
        key = tuple(bucket.names)
        flat = self._flats.get(key)
        if flat is None or flat.numel() != bucket.flat.numel():
            flat = self._gather(bucket)
            self._drop(key)
            self._flats[key] = flat
            self._pieces.update(zip(key, flat.split(bucket.sizes), strict=True))
        return flat

    def _gather(self, bucket: Bucket) -> Tensor:
        flat = torch.zeros(bucket.flat.numel(), dtype=torch.float32)
        for name, piece in zip(bucket.names, flat.split(bucket.sizes), strict=True):
            known = self._pieces.get(name)
            if known is not None and known.numel() == piece.numel():
                piece.copy_(known.view(-1))
        return flat

    def _drop(self, names: Sequence[str]) -> None:
        """Drop the buckets that contained these tensors; their other tensors keep their pieces."""
        tensors = {tensor_of(name) for name in names}
        stale = [key for key in self._flats if not tensors.isdisjoint(map(tensor_of, key))]
        for key in stale:
            del self._flats[key]

    @property
    def tensors(self) -> list[Tensor]:
        """All kept tensors, for counting memory."""
        return list(self._flats.values())

    @property
    def norm(self) -> float:
        """Norm of all kept tensors as one vector."""
        return float(sum(float(flat.double().square().sum()) for flat in self._flats.values()) ** 0.5)

    @property
    def squares(self) -> dict[str, float]:
        """Squared norms of the kept tensors, by the tensor that they belong to."""
        found: dict[str, float] = {}
        for names in self._flats:
            for name, square in squares_by_tensor(names, [self._pieces[name] for name in names]).items():
                found[name] = found.get(name, 0.0) + square
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Kept pieces by name; after the first bucket, without pieces of shares that no bucket has claimed.

        Those are left over from another cut: their elements now belong to a share that another rank keeps.
        """
        claimed = {name for key in self._flats for name in key}
        return {
            name: piece
            for name, piece in self._pieces.items()
            if not claimed or name in claimed or name == tensor_of(name)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state that `state_dict` returned; tensors that no longer fit become zeros."""
        self._flats.clear()
        self._pieces = {name: tensor.float().clone().view(-1) for name, tensor in state.items()}
