"""Exchange of packets (opaque bytes) between all ranks, for compressed data that cannot be summed in transit.

All packets in an exchange have the same size, which all ranks know. Each rank sends its packets directly to their
receivers: first to the next rank, then to the one after that, and so on. So every rank receives from only one other
rank at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.meter import Traffic

_TAG = 5 << 20  # differs from the tags of the rings, the trees, the parameter server and gossip


_ALIGNED = 8


def packet_rows(count: int, num_bytes: int) -> Tensor:
    """Return a uint8 buffer of shape [count, num_bytes]; rows are aligned, so they can be viewed as wider dtypes."""
    return torch.empty(count, -(-num_bytes // _ALIGNED) * _ALIGNED, dtype=torch.uint8)[:, :num_bytes]


@dataclass
class Packets:
    """Exchanges packets among the ranks of a metered group.

    Attributes:
        group: The metered process group.
        members: The ranks that take part, in the order of the packet rows; None for all ranks.
        tag: Tag of all messages.
    """

    group: MeteredProcessGroup
    members: tuple[int, ...] | None = None
    tag: int = _TAG

    def __post_init__(self) -> None:
        if self.members is None:
            self.members = tuple(range(self.group.size()))
        self.index, self.world_size = self.members.index(self.group.rank()), len(self.members)
        self._transport: dist.ProcessGroup = self.group.transport(torch.device("cpu"))

    def all_to_all(self, outgoing: Tensor) -> Tensor:
        """Send row j of `outgoing` to the j-th rank, and return the received packets.

        Row j of the result is the packet from the j-th rank. Both tensors are uint8 with shape [number of ranks, packet
        size].
        """
        incoming = packet_rows(*outgoing.shape)
        incoming[self.index] = outgoing[self.index]
        self._exchange("packet_all_to_all", outgoing, incoming)
        return incoming

    def all_gather(self, own: Tensor, *, name: str = "packet_all_gather") -> Tensor:
        """Gather the packets of all ranks.

        Args:
            own: This rank's packet, a flat uint8 tensor.
            name: Name under which the traffic is recorded.

        Returns:
            The packets: a uint8 tensor of shape [number of ranks, packet size].
        """
        incoming = packet_rows(self.world_size, own.numel())
        incoming[self.index] = own
        self._exchange(name, own.expand(self.world_size, -1), incoming)
        return incoming

    def _exchange(self, name: str, outgoing: Tensor, incoming: Tensor) -> None:
        assert self.members is not None
        size, rank, count = incoming.shape[1], self.index, self.world_size
        if not size:
            return
        with self.group.meter.collective(name, size * count) as traffic:
            others = [(rank + step) % count for step in range(1, count)]
            receives = [
                self._transport.recv([incoming[peer]], self.members[peer], self.tag)
                for peer in reversed(others)
            ]
            sends = [self._send(outgoing[peer], self.members[peer], size, traffic) for peer in others]
            for peer, work in zip(reversed(others), receives, strict=True):
                work.wait()
                traffic.arrived(self.members[peer], size)
            for work in sends:
                work.wait()
            traffic.received_bytes += size * (count - 1)

    def _send(self, packet: Tensor, peer: int, size: int, traffic: Traffic) -> dist.Work:
        traffic.count_sent(peer, size, lambda: ("packet", ""))
        return self._transport.send([packet], peer, self.tag)
