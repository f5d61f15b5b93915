"""FSDP2's all-gather and reduce-scatter in buffers that all ranks share, in place of messages around a ring.

`SharedShards` carries the collectives of a step on the thread that calls them. An all-gather is one barrier: before it,
FSDP2 copies this rank's chunk into the shared buffer; after it, FSDP2 copies the parameters out of that buffer. FSDP2
also writes the gradients of a unit directly to a shared buffer. If a step has a single micro-batch, the sums of all
units are computed after one barrier at its end, as far as the buffer has room for their gradients. Each barrier also
checks that all ranks have called the same collectives, because an `Agreement` gives it the digest of this rank's path.

The recorded traffic is the ring's, whatever the transport: each rank sends (W-1)/W of the tensor in W-1 messages to the
next rank. Spans are as measured, under the names of the ring's collectives. Sums are bitwise identical to the ring's. A
step whose messages are logged one by one uses the ring itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training import clock
from shardscope.training.collectives.agreement import Purpose
from shardscope.training.collectives.sharded import RingAllGather, RingReduceScatter, ShardRing
from shardscope.training.meter import Span, Traffic
from shardscope.training.transports.shm import ShardBuffers

_GATHER, _REDUCE, _CHECK = "ring_all_gather", "ring_reduce_scatter", "agreement"
_DIGEST_BYTES = 8


class SharedShards:
    """The collectives of one model's shards through shared memory.

    Args:
        ring: The ring that carries the steps in which `is_on` is false; this object uses its settings.
        buffers: The shared buffers.
    """

    def __init__(self, ring: ShardRing, buffers: ShardBuffers) -> None:
        self.ring, self.buffers = ring, buffers
        self.is_on = True
        """Whether collectives use the shared buffers; must be the same on all ranks."""
        self._agreement, self._meter = ring.agreement, ring.ring.group.meter
        self._waiting: list[int] = []
        self._counted: dict[tuple[str, int], Traffic] = {}

    # All-gather.

    def gather(self, purpose: Purpose, output: Tensor, *, is_shared: bool) -> None:
        """Fill `output`, which contains this rank's chunk, with the chunks of all ranks.

        Args:
            purpose: Purpose of the collective.
            output: The tensor.
            is_shared: Whether `output` is in a shared buffer.
        """
        digest = self._agreement.note(purpose)
        start = self._meter.handed_over = clock.now()
        with self._meter.waiting():
            if is_shared:
                self.buffers.meet(digest, "an all-gather")
            else:
                self.buffers.gather_pieces(output, digest)
        self._record(_GATHER, output.nbytes, start, clock.now())

    # Reduce-scatter.

    def make_room(self, unit: str, num_bytes: int) -> None:
        """Reduce the pending gradients in the buffer if a unit of `num_bytes` does not fit in addition to them."""
        if self._waiting and not self.buffers.fits(num_bytes):
            self._reduce(self._agreement.note(Purpose("adds up the gradients before those of", unit)))

    def reduce_mean(self, purpose: Purpose, output: Tensor, gradients: Tensor, *, is_shared: bool) -> None:
        """Average `gradients` over all ranks and write this rank's chunk of the mean to `output`.

        If the ring's `deferred` is true, this may return before `output` is written; `settle` then writes it.

        Args:
            purpose: Purpose of the collective.
            output: This rank's chunk of the mean.
            gradients: The tensor to average.
            is_shared: Whether `gradients` is the shared buffer that was last allocated for this unit.
        """
        if self.ring.measure is not None:
            self.ring.measure(purpose.layer, gradients)
        digest = self._agreement.note(purpose)
        start = self._meter.handed_over = clock.now()
        if not is_shared:
            with self._meter.waiting():
                self.buffers.reduce_pieces(output, gradients, self.ring.num_ranks, digest)
            self._record(_REDUCE, gradients.nbytes, start, clock.now())
            return
        self.buffers.add(output)
        self._waiting.append(gradients.nbytes)
        if not self.ring.deferred:
            self._reduce(digest)

    def _reduce(self, digest: int) -> None:
        start = clock.now()
        with self._meter.waiting():
            self.buffers.meet(digest, "a reduce-scatter")
        self._add_up(start)

    def _add_up(self, start: float) -> None:
        """Sum all pending gradients; the recorded time is divided among their units in proportion to the bytes."""
        self.buffers.reduce(self.ring.num_ranks)
        sizes, self._waiting = self._waiting, []
        per_byte = (clock.now() - start) / sum(sizes) if sizes else 0.0
        for size in sizes:
            end = start + per_byte * size
            self._record(_REDUCE, size, start, end)
            start = end

    def settle(self, purpose: Purpose) -> None:
        """End a step: check that all ranks have called the same collectives, and write all outputs.

        Raises:
            SpecError: The ranks have called different collectives.
        """
        digest = self._agreement.note(purpose)
        start = clock.now()
        self.buffers.meet(digest, "the other ranks at the end of a step")
        met = clock.now()
        self._record(_CHECK, _DIGEST_BYTES * self.buffers.world_size, start, met)
        self._add_up(met)
        self._agreement.start_path()

    # Records.

    def _record(self, name: str, payload: int, start: float, end: float) -> None:
        key = (name, payload)
        if key not in self._counted:
            self._counted[key] = self._of_digests() if name == _CHECK else self._around_ring(payload)
        self._meter.count(name, self._counted[key])
        self._meter.add_span(Span("communication", name, start, end, payload))

    def _around_ring(self, payload: int) -> Traffic:
        """Return the traffic of a reduce-scatter or an all-gather on the ring."""
        ring, others = self.ring.ring, self.buffers.world_size - 1
        chunk = payload // self.buffers.world_size
        sent = others * chunk
        following = (self.buffers.rank + 1) % self.buffers.world_size
        return Traffic(
            payload, sent, sent, messages=others * max(1, -(-chunk // ring.slice_bytes)), calls=1,
            sent_to={following: sent},
        )  # fmt: skip

    def _of_digests(self) -> Traffic:
        """Return the traffic that an exchange of digests has when it uses messages."""
        world_size, rank = self.buffers.world_size, self.buffers.rank
        others = [other for other in range(world_size) if other != rank]
        sent = _DIGEST_BYTES * len(others)
        return Traffic(
            _DIGEST_BYTES * world_size, sent, sent, messages=len(others), calls=1,
            sent_to=dict.fromkeys(others, _DIGEST_BYTES),
        )  # fmt: skip


class SharedAllGather(RingAllGather):
    """All-gather for `FSDPModule.set_custom_all_gather`, in a shared buffer or on the ring.

    FSDP2 must copy the parameters out of the result before it gathers the unit after the next; prefetching must be off.
    """

    def __init__(self, unit: str, shards: SharedShards) -> None:
        super().__init__(unit, shards.ring)
        self.shards, self._is_shared = shards, False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the buffer for a gathered tensor: a shared one, if it is large enough."""
        shared = self.shards.buffers.gathered(math.prod(size), dtype) if self.shards.is_on else None
        self._is_shared = shared is not None
        return super().allocate(size, dtype=dtype, device=device) if shared is None else shared

    def __call__(  # type: ignore[override]  # None where it has finished
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if not self.shards.is_on:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        self.shards.gather(self.gathering(output_tensor), output_tensor, is_shared=self._is_shared)
        return None


class SharedReduceScatter(RingReduceScatter):
    """Reduce-scatter for `FSDPModule.set_custom_reduce_scatter`, in a shared buffer or on the ring.

    FSDP2 allocates the gradients first and their reduced chunk second.
    """

    def __init__(self, unit: str, shards: SharedShards) -> None:
        super().__init__(unit, shards.ring)
        self.shards, self._is_shared, self._has_gradients = shards, False, False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the buffer for gradients, a shared one if it is large enough, or the tensor for their chunk."""
        is_first, self._has_gradients = not self._has_gradients, True
        if is_first and self.shards.is_on:
            count = math.prod(size)
            self.shards.make_room(self.unit, count * dtype.itemsize)
            shared = self.shards.buffers.to_reduce(count, dtype)
            self._is_shared = shared is not None
            if shared is not None:
                return shared
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._has_gradients = False
        if not self.shards.is_on:
            super().__call__(output_tensor, input_tensor, group, op, async_op)
            return
        purpose = self.reducing(input_tensor)
        self.shards.reduce_mean(purpose, output_tensor, input_tensor, is_shared=self._is_shared)
