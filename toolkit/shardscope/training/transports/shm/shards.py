"""Buffers in shared memory for the shards of one model: all-gathers and reduce-scatters without extra copies.

The caller writes what it sends directly into shared memory, and reads what it receives from there. A barrier separates
the two. Each rank passes the barrier a digest of all collectives that it has called, so that mismatched collectives are
detected there.

    all-gather        all ranks share a buffer for the whole tensor; each writes its own chunk; barrier; each reads all
    reduce-scatter    each rank writes its whole tensor to its own buffer; barrier; each sums its chunk over ranks

Several reduce-scatters can share one barrier: their tensors stay in the buffers until `reduce` sums them all. Tensors
larger than a buffer are exchanged in pieces, each of which takes a copy and a barrier.

The buffers of `ShardBuffers` are in CPU memory; `cuda_ipc.DeviceShardBuffers` has them on a GPU that the ranks share.

All buffers are double-buffered. A buffer is read before its rank arrives at the next barrier, and written again only
after that barrier, so no rank overwrites data that another rank still reads.

Chunk r is summed in the order of a ring, ((x[r+1] + x[r+2]) + ...) + x[r], so the result is bitwise identical to that
of `RingAllReduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.spec.shard_buffers import LINE, SETS, Limits, ShardBufferSizes, whole_pages
from shardscope.training.transports.shm.barriers import Barrier
from shardscope.training.transports.shm.layout import SharedMemoryLayout
from shardscope.training.transports.shm.memory import SharedMemory
from shardscope.training.transports.shm.peers import Peers


@dataclass(frozen=True)
class ShardLayout(SharedMemoryLayout):
    """Positions of two buffers for gathered tensors, and of two for each rank's tensors to reduce.

    Attributes:
        sizes: Sizes of both kinds of buffers.
    """

    sizes: ShardBufferSizes

    def digest_counter(self, rank: int, parity: int) -> int:
        """Digest of the collectives that a rank has called, for the barriers of one parity."""
        return self.arrivals_counter(rank) + 1 + parity

    def gathered_start(self, parity: int) -> int:
        """Position of a buffer for gathered tensors."""
        return self._data + parity * whole_pages(self.sizes.gathered_bytes)

    def reduced_start(self, parity: int, rank: int) -> int:
        """Position of a rank's buffer for tensors to reduce."""
        number = parity * self.world_size + rank
        return self.gathered_start(SETS) + number * whole_pages(self.sizes.reduced_bytes)

    @property
    def size(self) -> int:
        return self.reduced_start(SETS, 0)


Disagreed = Callable[[], None]
"""Function that raises an error because ranks have called different collectives."""


class ShardBuffers:
    """The shared buffers of one model; all ranks must create them, and call the same methods in the same order.

    Args:
        store: A store for these buffers alone.
        rank: This rank.
        world_size: Number of ranks.
        units: Sizes of the tensors that are gathered or reduced in a step, in bytes; larger tensors are exchanged in
            pieces.
        timeout_s: Time after which a rank that waits for another fails, in seconds.
        disagreed: Called when the digests of the ranks differ.

    Raises:
        CannotShare: A rank cannot open the memory; all ranks raise it.
    """

    limits: ClassVar = Limits()

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, *, units: Sequence[int],
        timeout_s: float, disagreed: Disagreed,
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self._timeout_s = rank, world_size, timeout_s
        self._sizes = ShardBufferSizes(world_size, units, self.limits)
        self._layout = layout = ShardLayout(world_size, self._sizes)
        self._memory = SharedMemory(store, rank, world_size, self._shared_bytes)
        self._peers = Peers(self._memory, layout, store, rank, rank)
        self._barrier, self._disagreed = Barrier(self._peers), disagreed
        self._digests = [[layout.digest_counter(r, parity) for r in range(world_size)] for parity in range(2)]
        self._gathered, self._reduced = self._open_buffers()
        self._gather = self._reduce = self._used = 0
        self._parts: list[Tensor] = []
        self._pending: list[tuple[Tensor, list[Tensor]]] = []
        self._views: dict[tuple[int, int, int, torch.dtype], list[Tensor]] = {}
        self._wholes: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @property
    def _shared_bytes(self) -> int:
        """Size of the shared CPU memory, in bytes."""
        return self._layout.size

    def _open_buffers(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Return the two buffers for gathered tensors, and the two sets of all ranks' buffers for tensors to reduce."""
        layout, sizes, sets = self._layout, self._sizes, range(SETS)
        gathered = [
            self._memory.tensor(layout.gathered_start(parity), sizes.gathered_bytes) for parity in sets
        ]
        reduced = [
            [
                self._memory.tensor(layout.reduced_start(parity, r), sizes.reduced_bytes)
                for r in range(self.world_size)
            ]
            for parity in sets
        ]
        return gathered, reduced

    @property
    def own(self) -> list[Tensor]:
        """This rank's own buffers."""
        return [buffers[self.rank] for buffers in self._reduced]

    def meet(self, digest: int, purpose: str) -> None:
        """Wait until all ranks have called this; all their earlier writes are visible afterwards.

        Args:
            digest: Digest of the collectives that this rank has called, of 64 bits.
            purpose: What this rank is waiting for, for the error message.

        Raises:
            DistBackendError: A rank is gone, or the wait timed out.
        """
        counters, barrier = self._memory.counters, self._barrier
        digests = self._digests[(barrier.number + 1) % 2]
        counters[digests[self.rank]] = digest
        barrier.wait(self._timeout_s, purpose)
        if any(counters[other] != digest for other in digests):
            self._disagreed()

    # All-gather.

    def gathered(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return the buffer for the next all-gather, into which this rank writes its chunk; None if it is too small."""
        if num_elements * dtype.itemsize > self._sizes.gathered_bytes:
            return None
        self._gather += 1
        parity = self._gather % 2
        key = (parity, num_elements, dtype)
        if key not in self._wholes:
            self._wholes[key] = self._gathered[parity][: num_elements * dtype.itemsize].view(dtype)
        return self._wholes[key]

    def gather_pieces(self, output: Tensor, digest: int) -> None:
        """Fill `output`, which contains this rank's own chunk, with the chunks of all ranks, piece by piece."""
        rows = output.view(self.world_size, -1)
        width = self._sizes.gathered_bytes // self.world_size // output.element_size()
        for first in range(0, rows.shape[1], width):
            part = rows[:, first : first + width]
            shared = self.gathered(part.numel(), output.dtype)
            assert shared is not None
            shared = shared.view(part.shape)
            shared[self.rank].copy_(part[self.rank])
            self.meet(digest, "an all-gather")
            for other in range(self.world_size):
                if other != self.rank:
                    part[other].copy_(shared[other])

    # Reduce-scatter.

    def fits(self, num_bytes: int) -> bool:
        """Return whether a tensor fits in addition to the pending tensors."""
        return self._used + num_bytes <= self._sizes.reduced_bytes

    def to_reduce(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return a buffer for a tensor to reduce; None if it does not fit in addition to the pending tensors."""
        size = num_elements * dtype.itemsize
        if not self.fits(size):
            return None
        start, self._used = self._used, self._used + -(-size // LINE) * LINE
        self._parts = self._views_of(self._reduce % 2, start, num_elements, dtype)
        return self._parts[self.rank]

    def _views_of(self, parity: int, start: int, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
        """Return views of all ranks' buffers at one position; cached, because every step uses the same positions."""
        key = (parity, start, num_elements, dtype)
        if key not in self._views:
            stop = start + num_elements * dtype.itemsize
            self._views[key] = [buffer[start:stop].view(dtype) for buffer in self._reduced[parity]]
        return self._views[key]

    def add(self, output: Tensor) -> None:
        """Register the output for this rank's chunk of the sum of the buffer that `to_reduce` returned last."""
        each = output.numel()
        chunks = [part[self.rank * each : (self.rank + 1) * each] for part in self._parts]
        self._pending.append((output, chunks))

    def reduce(self, divisor: int) -> None:
        """Write the sums of all pending tensors, divided by `divisor`, to their outputs; call `meet` first."""
        pending, self._pending = self._pending, []
        if pending:
            self._add_up([output for output, _ in pending], [chunks for _, chunks in pending], divisor)
        self._reduce, self._used = self._reduce + 1, 0

    def _add_up(self, outputs: Sequence[Tensor], chunks: Sequence[Sequence[Tensor]], divisor: int) -> None:
        first = (self.rank + 1) % self.world_size
        torch._foreach_copy_(list(outputs), [each[first] for each in chunks])
        for step in range(1, self.world_size):
            torch._foreach_add_(list(outputs), [each[(first + step) % self.world_size] for each in chunks])
        torch._foreach_div_(list(outputs), divisor)

    def reduce_pieces(self, output: Tensor, tensor: Tensor, divisor: int, digest: int) -> None:
        """Write this rank's chunk of the sum of `tensor`, divided by `divisor`, to `output`, piece by piece."""
        rows = tensor.view(self.world_size, -1)
        width = self._sizes.reduced_bytes // self.world_size // tensor.element_size()
        for first in range(0, rows.shape[1], width):
            part = rows[:, first : first + width]
            shared = self.to_reduce(part.numel(), tensor.dtype)
            assert shared is not None
            shared.view(part.shape).copy_(part)
            self.add(output[first : first + width])
            self.meet(digest, "a reduce-scatter")
            self.reduce(divisor)

    def close(self) -> None:
        """Leave the group of ranks; ranks that still wait for this rank get an error."""
        if not self._peers.is_closed:
            self._peers.close()
            self._memory.close()
