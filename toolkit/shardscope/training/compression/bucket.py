"""Buckets of gradients, each compressed as one tensor, and the per-bucket tensors kept from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

PADDING = "padding"


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged in one communication call.

    Attributes:
        names: Names of the tensors in the bucket, in order: parameter names, or the name of a sharding unit.
        shapes: Shapes of the tensors. A tensor that is split at a bucket boundary has a one-dimensional shape.
        flat: All tensors concatenated into one contiguous, one-dimensional CPU tensor; exchanged in place.
        step: The current training step, counted from 1.
        part: If each micro-batch has its own exchange, the index of this exchange within the step, from 0; else 0.
    """

    names: Sequence[str]
    shapes: Sequence[torch.Size]
    flat: Tensor
    step: int
    part: int = 0

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each tensor."""
        return [shape.numel() for shape in self.shapes]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of `flat`, a tensor with the layout of this bucket: one view per tensor, by name."""
        pieces = flat.split(self.sizes)
        return {
            name: piece.view(shape)
            for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)
        }

    def cut(self, flat: Tensor, start: int) -> Bucket:
        """Return one slice of this bucket as a new bucket.

        The pieces are named ``name@offset``: the tensor's name, and the offset within the tensor at which the piece
        begins. Elements past the end of this bucket are padding, and form a last piece named ``name@padding``.

        Args:
            flat: The elements of the slice, which become the `flat` of the new bucket.
            start: Index in this bucket of the first element of the slice.
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
    """Return the tensor name for the name of a piece made by `Bucket.cut`; any other name is returned unchanged."""
    return name.partition("@")[0]


def squares_by_tensor(names: Sequence[str], pieces: Sequence[Tensor]) -> dict[str, float]:
    """Return the squared norm for each tensor: the sum over its pieces, without padding."""
    squares: dict[str, float] = {}
    for name, piece in zip(names, pieces, strict=True):
        if not name.endswith(f"@{PADDING}"):
            wide = torch.promote_types(piece.dtype, torch.float32)
            norm = float(torch.linalg.vector_norm(piece, dtype=wide))
            squares[tensor_of(name)] = squares.get(tensor_of(name), 0.0) + norm**2
    return squares


@dataclass
class BucketState:
    """Flat float32 tensors that a method keeps from step to step, one per bucket (such as residuals).

    `DistributedDataParallel` rebuilds its buckets in the second step. The values are therefore also stored by tensor
    name, and are copied to the new buckets by that name.
    """

    _flats: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    _pieces: dict[str, Tensor] = field(default_factory=dict)

    def of(self, bucket: Bucket) -> Tensor:
        """Return the tensor kept for `bucket`, with the same layout; elements without a stored value are zero."""
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
        """Drop the flat tensors of all buckets that contain any of `names`; the values stored by name remain."""
        tensors = {tensor_of(name) for name in names}
        stale = [key for key in self._flats if not tensors.isdisjoint(map(tensor_of, key))]
        for key in stale:
            del self._flats[key]

    @property
    def tensors(self) -> list[Tensor]:
        """All kept tensors, one per bucket; listed so that their memory is counted."""
        return list(self._flats.values())

    @property
    def norm(self) -> float:
        """Euclidean norm over all kept tensors together."""
        return float(sum(float(flat.double().square().sum()) for flat in self._flats.values()) ** 0.5)

    @property
    def squares(self) -> dict[str, float]:
        """Squared norm of the kept tensor of each parameter or sharding unit, by name."""
        found: dict[str, float] = {}
        for names in self._flats:
            for name, square in squares_by_tensor(names, [self._pieces[name] for name in names]).items():
                found[name] = found.get(name, 0.0) + square
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Return the kept values by piece name, to save in a checkpoint.

        After the first use of a bucket, pieces of shares (``name@offset``) that belong to no current bucket are
        omitted, because they are left over from an earlier split of a bucket, and another rank now keeps those
        elements.
        """
        claimed = {name for key in self._flats for name in key}
        return {
            name: piece
            for name, piece in self._pieces.items()
            if not claimed or name in claimed or name == tensor_of(name)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state that `state_dict` returned; a tensor whose size has changed since then starts from zeros."""
        self._flats.clear()
        self._pieces = {name: tensor.float().clone().view(-1) for name, tensor in state.items()}
