"""The ring in the place of FSDP2's own collectives.

`fully_shard` lets its reduce-scatter and all-gather be replaced (`set_custom_reduce_scatter`, `set_custom_all_gather`):
by objects with `allocate`, which makes a buffer, and `__call__`, which communicates. `ShardRing` gives both, over one
ring among the ranks that share a model. All messages are sent by one thread a rank, in the order in which the
collectives were called, which is the same on every rank: so nothing can wait in a circle, and computing goes on.

FSDP2 pads every parameter to a multiple of the ranks along its first dimension, so all chunks are of equal size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.collectives.ring import Ring
from shardscope.training.collectives.sender import Sender

ScatterMean = Callable[[str, Tensor, Tensor], None]
"""Takes a unit's name, its flat gradients in CPU memory and room for this rank's share of their mean over all ranks."""


class _Sent(dist.Work):
    """What FSDP2 waits for."""

    def __init__(self, future: Future[None]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.result(None if timeout is None else timeout.total_seconds())
        return True


class ShardRing:
    """A ring among the ranks that hold the shards of one model.

    Args:
        ring: Over those ranks.
        num_ranks: All ranks whose gradients the mean is taken over; more than in the ring where there are replicas.
        staged: Send copies in host memory instead of the tensors themselves.
        scatter_mean: What takes the mean in the ring's place, where gradients are compressed.
    """

    def __init__(
        self, ring: Ring, num_ranks: int, *, staged: bool, scatter_mean: ScatterMean | None = None
    ) -> None:
        self.ring = ring
        self.num_ranks = num_ranks
        self.staged = staged
        self._scatter_mean = scatter_mean or self._add_up
        self.deferred = False
        """Whether a reduce-scatter may be still under way when it returns; `finish` then waits for all of them."""
        self.look_at: Callable[[str, Tensor], None] | None = None
        """Shown every unit's name and whole gradients, padded with zeros, before they are cut."""
        self._sender = Sender("shard-ring")
        self._pending: list[Future[None]] = []

    def submit(self, send: Callable[[], None]) -> Future[None]:
        """Have it done by the sending thread, after all that was submitted before."""
        self.ring.group.meter.handed_over = time.time()
        return self._sender.submit(send)

    def reduce_mean(self, unit: str, output: Tensor, buffer: Tensor) -> None:
        """This rank's chunk of the mean of `buffer` over all ranks goes to `output`; `buffer` is left as scratch."""
        if self.look_at is not None:
            self.look_at(unit, buffer)

        def send() -> None:
            if self.staged:
                own = torch.empty_like(output, device="cpu")
                self._scatter_mean(unit, buffer.cpu(), own)
                output.copy_(own)
            else:
                self._scatter_mean(unit, buffer, output)

        self._pending.append(self.submit(send))
        if not self.deferred or self.staged:
            self.finish()

    def _add_up(self, unit: str, buffer: Tensor, output: Tensor) -> None:  # noqa: ARG002
        torch.div(self.ring.reduce_scatter_(buffer), self.num_ranks, out=output)

    def gather(self, output: Tensor) -> dist.Work:
        """Fill `output`, which holds this rank's own chunk, from all ranks."""

        def send() -> None:
            if self.staged:
                output.copy_(self.ring.all_gather_(output.cpu()))
            else:
                self.ring.all_gather_(output)

        future = self.submit(send)
        if self.staged:  # copies must stay on the stream that FSDP2 has chosen for them
            future.result()
        return _Sent(future)

    def finish(self) -> None:
        """Wait for every reduce-scatter under way; raises what went wrong in one."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """End the sending thread."""
        self._sender.close()


class _Comm:
    """What both replacements share."""

    def __init__(self, ring: ShardRing) -> None:
        self.ring = ring

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class RingReduceScatter(_Comm):
    """For `FSDPModule.set_custom_reduce_scatter`. Takes the mean, whatever `op` says: FSDP2 must not divide."""

    def __init__(self, ring: ShardRing, unit: str) -> None:
        super().__init__(ring)
        self.unit = unit

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002
        op: Any,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        self.ring.reduce_mean(self.unit, output_tensor, input_tensor)


class RingAllGather(_Comm):
    """For `FSDPModule.set_custom_all_gather`. The input is this rank's chunk of the output, a view of it."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,  # noqa: ARG002
        group: dist.ProcessGroup,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> dist.Work:
        return self.ring.gather(output_tensor)
