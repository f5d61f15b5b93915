"""CHOCO-SGD: gossip by way of packed differences (Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, algorithm 2).

Each rank keeps a public copy of itself and of each neighbour. It packs how far its parameters are from its own public
copy and sends that to both neighbours; all who keep the copy move it by what comes out of the packet, so that copies of
one rank are the same to the bit wherever they are. Then it moves its parameters towards the mean of the copies. What a
packet leaves out stays in the next difference, so no other error feedback is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardscope.training.collectives.neighbours import Neighbours
from shardscope.training.compression import Bucket, Carrier, Compressor


@dataclass
class PublicCopies:
    """One rank's public copies.

    Args:
        neighbours: To exchange packets with.
        compressor: This rank's own; without a memory.
        carrier: For its seed, this rank's place, and the meter.
        step_size: Gamma, how far towards the mean of the copies, above 0 and at most 1.
        start: The parameters that all ranks start from, flat, in CPU memory.
        names: Of the parameters.
        shapes: Theirs.
    """

    neighbours: Neighbours
    compressor: Compressor
    carrier: Carrier
    step_size: float
    start: Tensor
    names: Sequence[str]
    shapes: Sequence[torch.Size]
    copies: dict[int, Tensor] = field(init=False)
    """Flat float32, by rank: this one's own and its neighbours'."""

    def __post_init__(self) -> None:
        self.copies = {
            rank: self.start.float().clone() for rank in (self.carrier.rank, *self.neighbours.ranks)
        }

    def mix_(self, flat: Tensor, step: int) -> None:
        """Bring all copies up to date, and move `flat`, this rank's parameters, towards their mean."""
        own, bucket = self.carrier.rank, self._bucket(flat.float() - self.copies[self.carrier.rank], step)
        packet = self.compressor.pack(bucket, self.carrier)
        packets = {own: packet, **self.neighbours.exchange(packet)}
        for rank, copy in self.copies.items():
            self.compressor.unpack(
                packets[rank], self._bucket(copy, step), self.carrier, sender=rank, add=True
            )
        weight = self.step_size / len(self.copies)
        for rank in self.neighbours.ranks:
            flat.add_(self.copies[rank] - self.copies[own], alpha=weight)

    def _bucket(self, flat: Tensor, step: int) -> Bucket:
        return Bucket(self.names, self.shapes, flat, step)
