"""PowerSGD: approximate each gradient matrix by two thin factors (Vogels, Karimireddy and Jaggi 2019, algorithm 1).

A tensor of two or more dimensions is treated as a matrix M, whose rows are its first dimension and whose columns are
all others. One step of power iteration from the last step's right factor Q gives ``P = M Q``. The ranks all-reduce P,
and each orthonormalizes the result. Then ``Q = M^T P`` is all-reduced, and ``P Q^T`` is the projection of the mean onto
P. Both factors are linear in M, so they can be summed over ranks, and messages have the same size for any number of
ranks. One-dimensional tensors, and matrices whose factors would not be smaller, are sent uncompressed in the same
message as the P factors. A bucket thus takes two all-reduces.

Q is kept between steps, so the approximation of a slowly changing gradient converges to the best one of its rank.
Factors are stored transposed, ``[rank, length]``, so that their products with M are as fast as reading M.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardscope.methods.compressors.powersgd._torch_orthogonal import orthonormalize_, unit_rows_
from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.compressor import Carrier, Compressor, refuse_not_finite
from shardscope.training.compression.memory import ErrorFeedback, Memory

_FACTOR = "factor."


@dataclass(frozen=True)
class FactoredTensor:
    """One tensor of a bucket that is being exchanged.

    Attributes:
        name: Name of the tensor.
        values: The matrix to approximate, [rows, columns].
        out: Output for the mean of the approximations, [rows, columns]; may be `values` itself if no residual is kept.
        rank: Rank of the approximation; 0 if the matrix is sent uncompressed.
        probes: Number of random directions whose images are sent with the left factor, to estimate the error.
    """

    name: str
    values: Tensor
    out: Tensor
    rank: int
    probes: int = 0

    @property
    def num_left(self) -> int:
        """Number of column vectors in the first message; all columns if the matrix is sent uncompressed."""
        return self.rank + self.probes if self.rank else self.values.shape[1]


def pays(rank: int, rows: int, columns: int) -> bool:
    """Return whether two factors of this rank are smaller than the matrix."""
    return rank * (rows + columns) < rows * columns


class PowerSgdCompressor(Compressor):
    """Compressor that exchanges low-rank factors, with or without error feedback.

    Args:
        rank: Rank of every approximation.
        feedback: Add this rank's compression error of a step to its next gradient.
        seed: The job's seed, from which all ranks draw the same initial factors.
        warmup_steps: Steps at the start whose gradients are sent uncompressed. Factors cannot follow the
            fast changes of early gradients, and the errors persist in the second moments of adaptive optimizers.
    """

    name = "powersgd"

    def __init__(self, rank: int, *, feedback: bool, seed: int, warmup_steps: int = 0) -> None:
        self.rank, self.warmup_steps = rank, warmup_steps
        self.memory = ErrorFeedback() if feedback else Memory()
        self._seed = seed
        self._factors: dict[str, Tensor] = {}

    def part_of(self, name: str, values: Tensor, out: Tensor, step: int) -> FactoredTensor:
        """Return how this tensor is sent in this step, which is the same on all ranks."""
        return FactoredTensor(name, values, out, self.rank if pays(self.rank, *values.shape) else 0)

    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:
        refuse_not_finite(bucket, self.name)
        if bucket.step <= self.warmup_steps:
            carrier.sum_(bucket.flat.div_(carrier.world_size))
            return
        values = self.memory.before(bucket)
        out = bucket.flat if bucket.flat.dtype == torch.float32 else torch.empty_like(values)
        parts = self._parts(bucket, values, out)
        matrices = [part for part in parts if part.rank]
        left = self._left(parts, bucket.step, carrier)
        right = self._right(matrices, left, carrier)
        with carrier.meter.span("codec", "decode"):
            for part, p, q in zip(matrices, left, right, strict=True):
                torch.mm(p[: part.rank].t(), q, out=part.out)
            self._keep({part.name: q for part, q in zip(matrices, right, strict=True)}, bucket.step)
            self.learn(parts, left, right, bucket.step)
        if out is not bucket.flat:
            bucket.flat.copy_(out)

    def learn(self, parts: list[FactoredTensor], left: list[Tensor], right: list[Tensor], step: int) -> None:
        """Hook called after each exchange, with all parts, and the factors of those parts that have any."""

    def _parts(self, bucket: Bucket, values: Tensor, out: Tensor) -> list[FactoredTensor]:
        pieces = zip(values.split(bucket.sizes), out.split(bucket.sizes), strict=True)
        return [
            self.part_of(name, piece.view(matrix_shape(shape)), place.view(matrix_shape(shape)), bucket.step)
            for name, shape, (piece, place) in zip(bucket.names, bucket.shapes, pieces, strict=True)
        ]

    def _left(self, parts: list[FactoredTensor], step: int, carrier: Carrier) -> list[Tensor]:
        """Exchange the left factors; returns all P, orthonormal and transposed, followed by the images of probes.

        Parts that are sent uncompressed are averaged in the same message.
        """
        sizes = [part.num_left * len(part.values) for part in parts]
        message = torch.empty(sum(sizes))
        pairs = list(zip(parts, message.split(sizes), strict=True))
        left = [piece.view(part.num_left, -1) for part, piece in pairs if part.rank]
        whole = [(part, piece.view_as(part.values)) for part, piece in pairs if not part.rank]
        matrices = [part for part in parts if part.rank]
        with carrier.meter.span("codec", "encode"):
            for part, piece in whole:
                piece.copy_(part.values)
            for part, p in zip(matrices, left, strict=True):
                torch.mm(self._start(part, step), part.values.t(), out=p)
        _mean_(message, carrier)
        with carrier.meter.span("codec", "decode"):
            for part, piece in whole:
                if self.memory.is_needed:
                    part.values.zero_()  # sent exactly, so nothing remains
                part.out.copy_(piece)
            orthonormalize_([p[: part.rank] for part, p in zip(matrices, left, strict=True)])
        return left

    def _right(self, matrices: list[FactoredTensor], left: list[Tensor], carrier: Carrier) -> list[Tensor]:
        """Exchange the right factors; returns all Q, transposed. Keeps the residual of this rank's own factors."""
        sizes = [part.rank * part.values.shape[1] for part in matrices]
        message = torch.empty(sum(sizes))
        right = [
            piece.view(part.rank, -1) for part, piece in zip(matrices, message.split(sizes), strict=True)
        ]
        with carrier.meter.span("codec", "encode"):
            for part, p, q in zip(matrices, left, right, strict=True):
                torch.mm(p[: part.rank], part.values, out=q)
                if self.memory.is_needed:
                    part.values.addmm_(p[: part.rank].t(), q, alpha=-1)
        _mean_(message, carrier)
        return right

    # Starting points of the iteration.

    def _start(self, part: FactoredTensor, step: int) -> Tensor:
        """Return this matrix's last Q, followed by probes. Missing rows are random, but equal on all ranks."""
        columns = part.values.shape[1]
        kept = self._factors.get(part.name)
        kept = torch.empty(0, columns) if kept is None or kept.shape[1] != columns else kept[: part.rank]
        missing = part.rank - len(kept) + part.probes
        return torch.cat([kept, self._draw(part.name, step, missing, columns)]) if missing else kept

    def _draw(self, name: str, step: int, count: int, columns: int) -> Tensor:
        """Draw Gaussian rows with a mean squared norm of 1."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{step}/{name}".encode()))
        return torch.randn(count, columns, generator=generator).div_(columns**0.5)

    def _keep(self, factors: Mapping[str, Tensor], step: int) -> None:
        """Keep right factors for the next step, with rows normalised to 1 to prevent overflow and underflow.

        A row that has become zero would stay zero, so it is redrawn. Earlier rows beyond the current rank are kept, in
        case the rank grows again.
        """
        kept = {name: q.clone() for name, q in factors.items()}
        unit_rows_(list(kept.values()))
        for name, q in kept.items():
            gone = ~q.any(dim=1)
            if gone.any():
                q[gone] = self._draw(name, step, int(gone.sum()), q.shape[1])
            before = self._factors.get(name)
            longer = before is not None and before.shape[1] == q.shape[1] and len(before) > len(q)
            self._factors[name] = torch.cat([q, before[len(q) :]]) if before is not None and longer else q

    @property
    def memories(self) -> Sequence[Memory]:
        return (self.memory,)

    @property
    def figures(self) -> dict[str, float]:
        return {f"{kind}_norm": kept.norm for kind, kept in self.memory.kept.items()}

    @property
    def work_space(self) -> list[Tensor]:
        return [
            *self._factors.values(),
            *(flat for kept in self.memory.kept.values() for flat in kept.tensors),
        ]

    def state_dict(self) -> dict[str, Tensor]:
        factors = {f"{_FACTOR}{name}": factor for name, factor in self._factors.items()}
        return {**self.memory.state_dict(), **factors}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.memory.load_state_dict(state)
        self._factors = {
            key.removeprefix(_FACTOR): factor.float().clone()
            for key, factor in state.items()
            if key.startswith(_FACTOR)
        }


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return a tensor's shape as a matrix: first dimension by all others, or one row if it has fewer than two."""
    return (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())


def _mean_(message: Tensor, carrier: Carrier) -> None:
    if message.numel():
        carrier.sum_(message).div_(carrier.world_size)
