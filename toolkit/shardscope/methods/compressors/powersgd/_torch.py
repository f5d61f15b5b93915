"""PowerSGD: approximate each gradient matrix by two thin factors (Vogels, Karimireddy and Jaggi 2019, algorithm 1).

A tensor of two or more dimensions is reshaped to a matrix M: its first dimension becomes the rows, and all others
become the columns. One step of power iteration, starting from the right factor Q of the previous step, gives
``P = M Q``. The ranks all-reduce P, and each rank orthonormalises the result. Then ``Q = M^T P`` is all-reduced, and
``P Q^T`` is the projection of the mean matrix onto the columns of P. Both factors are linear in M, so they can be
summed over ranks, and the size of messages does not depend on the number of ranks. One-dimensional tensors, and
matrices that are not larger than their factors, are sent uncompressed in the same message as the P factors. A bucket
thus takes two all-reduces.

Q is kept between steps, so the approximation of a slowly changing gradient converges to the best approximation of that
rank. Factors are stored transposed, ``[rank, length]``, so that multiplying them by M is as fast as reading M.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardscope.methods.compressors.powersgd._torch_orthogonal import orthonormalize_, unit_rows_
from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.compressor import Carrier, Compressor, check_finite
from shardscope.training.compression.memory import ErrorFeedback, Memory

_FACTOR = "factor."


@dataclass(frozen=True)
class FactoredTensor:
    """Form in which one tensor of a bucket is sent in one step.

    Attributes:
        name: Name of the tensor.
        values: The matrix to approximate, [rows, columns].
        out: Output for the mean over ranks, [rows, columns]; may be `values` itself if no residual is kept.
        rank: Rank of the approximation; 0 if the matrix is sent uncompressed.
        probes: Number of random vectors whose products with the matrix are sent with the left factor, to estimate the
            error.
    """

    name: str
    values: Tensor
    out: Tensor
    rank: int
    probes: int = 0

    @property
    def num_left(self) -> int:
        """Number of columns in the first message: the rank plus the probes, or all columns if sent uncompressed."""
        return self.rank + self.probes if self.rank else self.values.shape[1]


def pays(rank: int, rows: int, columns: int) -> bool:
    """Return whether the two factors of this rank have fewer elements than the matrix."""
    return rank * (rows + columns) < rows * columns


class PowerSgdCompressor(Compressor):
    """Compressor that exchanges low-rank factors, with or without error feedback.

    Args:
        rank: Rank of each approximation.
        feedback: Whether to add the compression error of a step to the next step's gradient, on each rank.
        seed: The job's seed, from which all ranks draw the same initial factors.
        warmup_steps: Number of steps at the start whose gradients are sent uncompressed. Low-rank factors cannot follow
            the fast changes of early gradients, and their errors persist in the second moments of adaptive optimizers.
    """

    name = "powersgd"

    def __init__(self, rank: int, *, feedback: bool, seed: int, warmup_steps: int = 0) -> None:
        self.rank, self.warmup_steps = rank, warmup_steps
        self.memory = ErrorFeedback() if feedback else Memory()
        self._seed = seed
        self._factors: dict[str, Tensor] = {}

    def part_of(self, name: str, values: Tensor, out: Tensor, step: int) -> FactoredTensor:
        """Decide how to send a tensor in this step; all ranks make the same decision."""
        return FactoredTensor(name, values, out, self.rank if pays(self.rank, *values.shape) else 0)

    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:
        check_finite(bucket, self.name)
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
        """Hook for subclasses, called after each exchange.

        Args:
            parts: All tensors of the bucket.
            left: Left factors of those parts that are not sent uncompressed, as returned by `_left`.
            right: Right factors of the same parts, transposed.
            step: Number of the step.
        """

    def _parts(self, bucket: Bucket, values: Tensor, out: Tensor) -> list[FactoredTensor]:
        pieces = zip(values.split(bucket.sizes), out.split(bucket.sizes), strict=True)
        return [
            self.part_of(name, piece.view(matrix_shape(shape)), place.view(matrix_shape(shape)), bucket.step)
            for name, shape, (piece, place) in zip(bucket.names, bucket.shapes, pieces, strict=True)
        ]

    def _left(self, parts: list[FactoredTensor], step: int, carrier: Carrier) -> list[Tensor]:
        """All-reduce the left factors, and in the same message the parts that are sent uncompressed.

        Return one tensor for each matrix: its orthonormal P, transposed, followed by its products with the probes.
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
                    part.values.zero_()  # sent uncompressed, so there is no residual
                part.out.copy_(piece)
            orthonormalize_([p[: part.rank] for part, p in zip(matrices, left, strict=True)])
        return left

    def _right(self, matrices: list[FactoredTensor], left: list[Tensor], carrier: Carrier) -> list[Tensor]:
        """All-reduce the right factors, and return them transposed.

        With error feedback, the part of each matrix that this rank's own factors do not represent stays as residual.
        """
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

    # Right factors from which the power iteration starts.

    def _start(self, part: FactoredTensor, step: int) -> Tensor:
        """Return the starting rows for a matrix: the last Q, followed by probes.

        Probes are random, as are rows without a last Q. All ranks draw the same random rows.
        """
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
        """Keep right factors for the next step, with rows scaled to unit norm to prevent overflow and underflow.

        A row that has become zero would stay zero, so it is redrawn. Rows of earlier steps beyond the current rank are
        kept, in case the rank grows again.
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
    """Return a tensor's matrix shape: (first dimension, product of all others), or (1, n) for a vector or scalar."""
    return (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())


def _mean_(message: Tensor, carrier: Carrier) -> None:
    if message.numel():
        carrier.sum_(message).div_(carrier.world_size)
