"""CHOCO-SGD: gossip with packed differences (Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, algorithm 2).

Each rank keeps a public copy of its own parameters, and one of each neighbour's. It packs the difference between its
parameters and the public copy of them, and sends the packet to both neighbours. All ranks that keep this copy add the
unpacked difference to it, so all copies of one rank's parameters are bit-identical. Then the rank moves its parameters
towards the mean of the copies. Compression errors remain in the next difference, so no other error feedback is needed.
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
    """Public copies of parameters that one rank keeps and updates by exchanging packets with its neighbours.

    Args:
        neighbours: The neighbours to exchange packets with.
        compressor: This rank's compressor, without a residual.
        carrier: Transport of compressed values, which provides the seed, this rank's number, and the meter.
        step_size: Gamma, the size of the step towards the mean of the copies, above 0 and at most 1.
        start: The initial parameters, equal on all ranks, as a flat tensor in CPU memory.
        names: Names of the parameters.
        shapes: Shapes of the parameters.
    """

    neighbours: Neighbours
    compressor: Compressor
    carrier: Carrier
    step_size: float
    start: Tensor
    names: Sequence[str]
    shapes: Sequence[torch.Size]
    copies: dict[int, Tensor] = field(init=False)
    """Public copies by rank, for this rank and its neighbours, as flat float32 tensors."""

    def __post_init__(self) -> None:
        self.copies = {
            rank: self.start.float().clone() for rank in (self.carrier.rank, *self.neighbours.ranks)
        }

    def mix_(self, flat: Tensor, step: int) -> None:
        """Update all copies, and move this rank's parameters `flat` towards the mean of the copies."""
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
