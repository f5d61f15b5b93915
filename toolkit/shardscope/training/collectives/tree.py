"""The binary-tree all-reduce: partial sums go up to the root, and the total comes back down.

Rank 0 is the root, and rank r has the parent (r-1) // 2 and the children 2r+1 and 2r+2. Every rank adds its children's
sums to its own tensor, sends the result to its parent, and forwards the total from there to its children. Each edge
carries the tensor once each way, so the ranks together send 2(W-1) of it, as a ring does. But a rank with two children
sends three tensors, where a ring spreads the load evenly, 2(W-1)/W per rank. The tree's advantage is its 2 log2(W)
steps against the ring's 2(W-1): it is faster with small tensors and many ranks.

The tensor is cut into slices of at most `slice_bytes`. Slice i+1 goes up while slice i is added one level higher and
earlier ones are on their way down. A slice takes 2d slots from depth d to the root and back, so a rank at depth d
passes slice i down after it has sent slice i+2d up; in fact a little later, so that no rank waits for a late peer. As
in the ring, a few receives are posted ahead into a few small buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardscope.training.collectives.process_group import MeteredProcessGroup, num_bytes
from shardscope.training.collectives.ring import split_sizes
from shardscope.training.meter import Traffic

SLICE_BYTES = 2 << 20  # best of 1/4 to 4 MiB for tensors of 16 to 48 MB on 4 ranks
_AHEAD = 2  # receives posted in advance: gloo sends a message only after its receive is posted
_SLACK = 2  # slices that a rank sends up beyond the round trip to the root
_FIRST_TAG = 1 << 22  # keeps our messages separate from the ring's and the user's own


@dataclass
class TreeAllReduce:
    """The binary tree over a metered group.

    Attributes:
        group: The ranks.
        slice_bytes: Longest message, in bytes; a longer tensor is cut into slices.
    """

    group: MeteredProcessGroup
    slice_bytes: int = SLICE_BYTES
    _scratch: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rank, world_size = self.group.rank(), self.group.size()
        self.parent = (rank - 1) // 2 if rank else None
        self.children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size]
        self.depth = (rank + 1).bit_length() - 1

    @property
    def work_space(self) -> list[torch.Tensor]:
        """The buffers kept from call to call."""
        return list(self._scratch.values())

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place. It is contiguous, with any shape that is the same on every rank."""
        flat = tensor.view(-1)
        with self.group.meter.collective("tree_all_reduce", num_bytes(flat)) as traffic:
            if flat.numel():
                _Flow(self, self._slices(flat), traffic).run()
        return tensor

    def _slices(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        num_slices = min(flat.numel(), -(-num_bytes(flat) // self.slice_bytes))
        slices: Sequence[torch.Tensor] = flat.split(split_sizes(flat.numel(), num_slices))
        return slices

    def buffers(self, example: torch.Tensor) -> list[list[torch.Tensor]]:
        """Buffers per child, shaped like `example`, for the receives that are posted ahead."""
        count, size = len(self.children) * _AHEAD, num_bytes(example)
        kept = self._scratch.get(example.device)
        if kept is None or kept.numel() < count * size:
            kept = torch.empty(count * size, dtype=torch.uint8, device=example.device)
            self._scratch[example.device] = kept
        rows = [row.view(example.dtype) for row in kept[: count * size].view(count, size)]
        return [rows[start : start + _AHEAD] for start in range(0, count, _AHEAD)]


class _Flow:
    """The messages of one call: slice i goes up with tag 2i and comes down with tag 2i+1."""

    def __init__(self, tree: TreeAllReduce, slices: Sequence[torch.Tensor], traffic: Traffic) -> None:
        self.parent, self.children, self.depth = tree.parent, tree.children, tree.depth
        self.slices, self.traffic = slices, traffic
        self.scratch = dict(zip(self.children, tree.buffers(slices[0]), strict=True))
        self.transport: Any = tree.group.transport(slices[0].device)
        self.climbing: dict[int, dist.Work] = {}
        self.falling: list[dist.Work] = []
        self.receives: dict[tuple[int, int], dist.Work] = {}

    def run(self) -> None:
        """Send every slice up and down again, each at its turn."""
        num_slices = len(self.slices)
        lag = 2 * self.depth + _SLACK if self.depth else 0
        for i in range(min(_AHEAD, num_slices)):
            self._expect_from_children(i)
        for i in range(num_slices + lag):
            if i < num_slices:
                self._take_up(i)
            if 0 <= i - lag + _AHEAD < num_slices:
                self._expect_from_parent(i - lag + _AHEAD)
            if i >= lag:
                self._take_down(i - lag)
        for work in [*self.climbing.values(), *self.falling]:
            work.wait()

    def _take_up(self, i: int) -> None:
        own = self.slices[i]
        for child in self.children:
            self.receives.pop((child, i)).wait()
            own.add_(self._buffer(child, i))
        if i + _AHEAD < len(self.slices):
            self._expect_from_children(i + _AHEAD)
        if self.parent is not None:
            self.climbing[i] = self._send(own, self.parent, 2 * i)

    def _take_down(self, i: int) -> None:
        if self.parent is not None:
            self.receives.pop((self.parent, i)).wait()
        for child in self.children:
            self.falling.append(self._send(self.slices[i], child, 2 * i + 1))

    def _expect_from_children(self, i: int) -> None:
        for child in self.children:
            self._receive(self._buffer(child, i), child, i, 2 * i)

    def _expect_from_parent(self, i: int) -> None:
        """Post the receive of slice i's total, which overwrites this rank's partial sum after that has been sent."""
        if self.parent is not None:
            self.climbing.pop(i).wait()
            self._receive(self.slices[i], self.parent, i, 2 * i + 1)

    def _buffer(self, child: int, i: int) -> torch.Tensor:
        return self.scratch[child][i % _AHEAD][: self.slices[i].numel()]

    def _send(self, tensor: torch.Tensor, peer: int, number: int) -> dist.Work:
        self.traffic.count_sent(peer, num_bytes(tensor))
        work: dist.Work = self.transport.send([tensor], peer, _FIRST_TAG + number)
        return work

    def _receive(self, into: torch.Tensor, peer: int, i: int, number: int) -> None:
        self.receives[peer, i] = self.transport.recv([into], peer, _FIRST_TAG + number)
        self.traffic.received_bytes += num_bytes(into)


def tree_all_reduce(tensor: torch.Tensor, group: MeteredProcessGroup, **settings: Any) -> torch.Tensor:
    """Sum `tensor` over the ranks of `group`, in place; `settings` are those of `TreeAllReduce`."""
    return TreeAllReduce(group, **settings).all_reduce_(tensor)
