"""The ranks of a context group, and the collectives that attention over parts of sequences calls in its passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training import _compat
from shardscope.training.tensor.axis import Message, TensorAxis, record


@dataclass(frozen=True, eq=False)
class Arriving:
    """A tensor on its way around the ring; `wait` returns it."""

    tensor: Tensor
    wait_for: Callable[[], object]

    def wait(self) -> Tensor:
        """Wait until the tensor has arrived and the own one has left, and return it."""
        self.wait_for()
        return self.tensor


@dataclass(frozen=True, eq=False)
class SequenceAxis(TensorAxis):
    """The ranks of one context group; without a group, for tracing one rank's part, nothing is sent."""

    name: ClassVar[str] = "context"

    def all_gather(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, of shape ``(size, *own.shape)``."""
        every, sent = own.new_empty((self.size, *own.shape)), own.contiguous()
        self._call("all_gather", every, lambda group: _compat.all_gather_single(every, sent, group))
        return every

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return the sum over all ranks of this rank's element of `parts`, which has shape ``(size, ...)``."""
        own = parts.new_empty(parts.shape[1:])
        self._call("reduce_scatter", parts, lambda group: _compat.reduce_scatter_single(own, parts, group))
        return own

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send element i of `parts`, which has shape ``(size, ...)``, to rank i; return the elements received."""
        found = torch.empty_like(parts)
        self._call("all_to_all", parts, lambda group: dist.all_to_all_single(found, parts, group=group))
        return found

    def rotate(self, own: Tensor) -> Arriving:
        """Start to send a contiguous tensor to the next rank, and to receive that of the previous rank."""
        arriving = torch.empty_like(own)
        is_listed = record(lambda phase: Message(self.name, "send", phase, own.nbytes))
        if is_listed or self.group is None:
            return Arriving(arriving, lambda: None)
        group, next_rank, previous = self.group, (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, own, group=group, group_peer=next_rank),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=previous),
        ])  # fmt: skip

        def wait() -> None:
            with group.meter.waiting(is_within_layer=True):
                for work in works:
                    work.wait()

        return Arriving(arriving, wait)
