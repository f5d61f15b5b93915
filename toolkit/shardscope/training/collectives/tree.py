"""All-reduce on a binary tree: partial sums are sent up to the root, and the total is sent back down.

Rank 0 is the root; rank r has the parent (r-1) // 2 and the children 2r+1 and 2r+2. Each rank adds the sums of its
children to its own tensor, and sends the result to its parent. Later it receives the total from its parent, and sends
it to its children. Each edge of the tree transmits the tensor once in each direction, so W ranks together send it
2(W-1) times, as in a ring. A rank with a parent and two children sends it three times, while in a ring each rank sends
only 2(W-1)/W times the tensor's size. However, the tree takes only 2 log2(W) steps, while a ring takes 2(W-1), so the
tree is faster for small tensors and many ranks.

The tensor is split into slices of at most `slice_bytes`, which are pipelined: slice i+1 is sent up while slice i is
added one level higher, and earlier slices are sent down. In units of the time per slice and level, a slice takes 2d
from a rank at depth d to the root and back. Therefore a rank at depth d sends slice i down only after it has sent slice
i+2d up, plus `_SLACK` more slices, so that no rank has to wait if another rank is late. As in the ring, a few receives
are posted in advance, into small buffers.
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

SLICE_BYTES = 2 << 20  # the fastest size from 1/4 to 4 MiB for tensors of 16 to 48 MB on 4 ranks
_AHEAD = 2  # receives posted in advance: gloo sends a message only after the receiver has posted its receive
_SLACK = 2  # number of slices by which a rank sends a slice down later than necessary
_FIRST_TAG = 1 << 22  # differs from the tags of the ring and of the user's own messages


@dataclass
class TreeAllReduce:
    """All-reduce on a binary tree of the ranks in a metered process group.

    Attributes:
        group: The metered process group.
        slice_bytes: Maximum size of a message, in bytes; larger tensors are split into slices.
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
        """Buffers that are reused between calls."""
        return list(self._scratch.values())

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place. It must be contiguous and have the same shape on every rank."""
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
        """Return buffers for receives posted in advance: for each child, a list of tensors shaped like `example`."""
        count, size = len(self.children) * _AHEAD, num_bytes(example)
        kept = self._scratch.get(example.device)
        if kept is None or kept.numel() < count * size:
            kept = torch.empty(count * size, dtype=torch.uint8, device=example.device)
            self._scratch[example.device] = kept
        rows = [row.view(example.dtype) for row in kept[: count * size].view(count, size)]
        return [rows[start : start + _AHEAD] for start in range(0, count, _AHEAD)]


class _Flow:
    """Sends and receives the messages of one all-reduce: slice i is sent up with tag 2i, and down with tag 2i+1."""

    def __init__(self, tree: TreeAllReduce, slices: Sequence[torch.Tensor], traffic: Traffic) -> None:
        self.parent, self.children, self.depth = tree.parent, tree.children, tree.depth
        self.slices, self.traffic = slices, traffic
        self.scratch = dict(zip(self.children, tree.buffers(slices[0]), strict=True))
        self.transport: Any = tree.group.transport(slices[0].device)
        self.climbing: dict[int, dist.Work] = {}
        self.falling: list[dist.Work] = []
        self.receives: dict[tuple[int, int], dist.Work] = {}

    def run(self) -> None:
        """Send every slice up to the parent and, with a delay of `lag` slices, down to the children."""
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
            self.traffic.arrived(child, num_bytes(own))
            own.add_(self._buffer(child, i))
        if i + _AHEAD < len(self.slices):
            self._expect_from_children(i + _AHEAD)
        if self.parent is not None:
            self.climbing[i] = self._send(own, self.parent, 2 * i)

    def _take_down(self, i: int) -> None:
        if self.parent is not None:
            self.receives.pop((self.parent, i)).wait()
            self.traffic.arrived(self.parent, num_bytes(self.slices[i]))
        for child in self.children:
            self.falling.append(self._send(self.slices[i], child, 2 * i + 1))

    def _expect_from_children(self, i: int) -> None:
        for child in self.children:
            self._receive(self._buffer(child, i), child, i, 2 * i)

    def _expect_from_parent(self, i: int) -> None:
        """Post the receive of the total of slice `i`, after the send of this rank's partial sum has finished."""
        if self.parent is not None:
            self.climbing.pop(i).wait()
            self._receive(self.slices[i], self.parent, i, 2 * i + 1)

    def _buffer(self, child: int, i: int) -> torch.Tensor:
        return self.scratch[child][i % _AHEAD][: self.slices[i].numel()]

    def _send(self, tensor: torch.Tensor, peer: int, number: int) -> dist.Work:
        self.traffic.count_sent(peer, num_bytes(tensor), lambda: self._label(number))
        work: dist.Work = self.transport.send([tensor], peer, _FIRST_TAG + number)
        return work

    def _label(self, number: int) -> tuple[str, str]:
        """Return the content of message `number`, and the level of the tree that it passes."""
        if number % 2:
            return "total", f"down, level {self.depth + 1}"
        return "partial sum", f"up, level {self.depth}"

    def _receive(self, into: torch.Tensor, peer: int, i: int, number: int) -> None:
        self.receives[peer, i] = self.transport.recv([into], peer, _FIRST_TAG + number)
        self.traffic.received_bytes += num_bytes(into)
