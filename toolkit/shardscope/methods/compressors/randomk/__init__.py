"""Random-k: every rank sends the same random elements, redrawn in each step (Stich et al. 2018, arXiv:1809.07599)."""

from __future__ import annotations

from typing import Any

from shardscope.methods.compressors.packed import PackedCompression, Ratio
from shardscope.spec.look import Look


class RandomK(PackedCompression):
    """Sends only the values of random elements, which are the same on all ranks."""

    name = "randomk"
    carriage = "sums"
    family = "Some of the elements"
    look = Look("#e06c2c", "dot", "diamond-open")
    codec_passes = 0.0  # only what is sent is read
    summed_width = 4

    ratio: Ratio = 0.01
    """Share of the elements that are sent, 0 < value <= 1."""
    feedback: bool = True
    """Error feedback: what a step leaves out is added to the next step's gradient. Without it, values are scaled up."""

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import kept_bytes

        return kept_bytes(num_elements, self.ratio)

    @property
    def consensus_step(self) -> float:
        """Consensus step of gossip, in proportion to the ratio (Koloskova et al. 2019, arXiv:1902.00340, table 3)."""
        return min(0.5, 2.0 * self.ratio)

    def codec(self) -> Any:
        from shardscope.methods.compressors.randomk import _torch

        return (_torch.RandomKCodec if self.feedback else _torch.ScaledRandomKCodec)(self.ratio)
