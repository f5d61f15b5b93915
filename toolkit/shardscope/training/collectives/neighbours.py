"""Gossip averaging: each rank averages its tensor with the tensors of its two neighbours on a ring.

Each rank sends its whole tensor to both neighbours while it receives theirs. The tensors are sent in slices, so that
averaging one slice overlaps receiving the next. The rank's own tensor and those of its neighbours have equal weights:
1/3 each, or 1/2 each with two ranks, where a rank has only one neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.meter import Traffic

_AHEAD = 2  # receives posted in advance for each neighbour
_FIRST_TAG = 3 << 20  # differs from the tags of the rings and of the parameter server


@dataclass
class Neighbours:
    """Exchanges tensors with this rank's neighbours on a ring of all ranks in a group.

    Attributes:
        group: The metered process group; its ranks form the ring in order.
        slice_bytes: Maximum size of a message, in bytes.
        device: The device of all tensors.
        work_space: Receive buffers, reused between calls.
    """

    group: MeteredProcessGroup
    slice_bytes: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        rank, world_size = self.group.rank(), self.group.size()
        # every rank sends to the next rank first; otherwise one rank could receive two messages at once, another none
        self.ranks = list(dict.fromkeys([(rank + 1) % world_size, (rank - 1) % world_size]))
        self.work_space: list[Tensor] = []
        self._transport: dist.ProcessGroup = self.group.transport(self.device)

    def average_(self, flat: Tensor) -> Tensor:
        """Replace `flat` with the mean of this rank's and its neighbours' tensors (flat tensors of one size)."""
        with self.group.meter.collective("gossip_mix", flat.numel() * flat.element_size()) as traffic:
            slices = flat.split(max(1, self.slice_bytes // flat.element_size()))
            receives = _Receives(self, slices, traffic)
            sends = [
                [self._send(piece, peer, i, traffic) for peer in self.ranks] for i, piece in enumerate(slices)
            ]
            for i, own in enumerate(slices):
                received = receives.take(i)
                for work in sends[i]:
                    work.wait()
                _mean_(own, received, self.group.rank())
                receives.post(i + _AHEAD)
        return flat

    def exchange(self, packet: Tensor) -> dict[int, Tensor]:
        """Send `packet` (uint8, the same size on all ranks) to each neighbour, and return their packets by rank."""
        incoming = {peer: torch.empty_like(packet) for peer in self.ranks}
        with self.group.meter.collective("gossip_packets", packet.numel()) as traffic:
            receives = [self.receive(into, peer, 0, traffic) for peer, into in incoming.items()]
            sends = [self._send(packet, peer, 0, traffic) for peer in self.ranks]
            for peer, work in zip(incoming, receives, strict=True):
                work.wait()
                traffic.arrived(peer, packet.numel())
            for work in sends:
                work.wait()
        return incoming

    def _send(self, piece: Tensor, peer: int, i: int, traffic: Traffic) -> dist.Work:
        traffic.count_sent(peer, piece.numel() * piece.element_size())
        return self._transport.send([piece], peer, _FIRST_TAG + i)

    def receive(self, into: Tensor, peer: int, i: int, traffic: Traffic) -> dist.Work:
        """Post the receive of slice `i` from the neighbour `peer`, and return its handle."""
        traffic.received_bytes += into.numel() * into.element_size()
        return self._transport.recv([into], peer, _FIRST_TAG + i)


class _Receives:
    """Posts receives in advance, into a few buffers that are used in rotation."""

    def __init__(self, neighbours: Neighbours, slices: tuple[Tensor, ...], traffic: Traffic) -> None:
        self.neighbours, self.slices, self.traffic = neighbours, slices, traffic
        ahead = min(_AHEAD, len(slices))
        needed, kept = ahead * len(neighbours.ranks), neighbours.work_space
        like = (slices[0].shape, slices[0].dtype)
        if len(kept) < needed or (kept[0].shape, kept[0].dtype) != like:
            kept[:] = [torch.empty_like(slices[0]) for _ in range(needed)]
        free = iter(kept)
        self.buffers = [{peer: next(free) for peer in neighbours.ranks} for _ in range(ahead)]
        self.works: dict[int, list[dist.Work]] = {}
        for i in range(_AHEAD):
            self.post(i)

    def _into(self, i: int) -> dict[int, Tensor]:
        buffers = self.buffers[i % len(self.buffers)]
        return {peer: buffer[: self.slices[i].numel()] for peer, buffer in buffers.items()}

    def post(self, i: int) -> None:
        """Post the receives of slice `i` from all neighbours; a no-op after the last slice."""
        if i < len(self.slices):
            into = self._into(i).items()
            self.works[i] = [self.neighbours.receive(buffer, peer, i, self.traffic) for peer, buffer in into]

    def take(self, i: int) -> dict[int, Tensor]:
        """Wait for slice `i` from all neighbours, and return the received slices by rank."""
        for peer, work in zip(self.neighbours.ranks, self.works.pop(i), strict=True):
            work.wait()
            self.traffic.arrived(peer, self.slices[i].numel() * self.slices[i].element_size())
        return self._into(i)


def _mean_(own: Tensor, received: dict[int, Tensor], rank: int) -> None:
    """Replace `own` with the mean of all tensors, added in rank order, so that equal inputs give identical bits."""
    first, *others = [
        tensor for _, tensor in sorted([(rank, own), *received.items()], key=lambda item: item[0])
    ]
    total = first + others[0]
    for tensor in others[1:]:
        total.add_(tensor)
    torch.div(total, 1 + len(received), out=own)
