"""Random-k: every rank sends the same random elements, redrawn in each step (Stich et al. 2018, arXiv:1809.07599)."""

from __future__ import annotations

from typing import Any

from shardscope.methods.compressors.packed import PackedCompression, Ratio
from shardscope.spec.look import MethodStyle


class RandomK(PackedCompression):
    """Sends the values of randomly drawn elements; all ranks draw the same elements, so no indices are sent."""

    name = "randomk"
    carriage = "sums"
    family = "Sparsification"
    look = MethodStyle("#e06c2c", "dot", "diamond-open")
    codec_passes = 0.0  # reads only the elements that it sends
    summed_width = 4

    ratio: Ratio = 0.01
    """Fraction of the elements to send, 0 < value <= 1."""
    feedback: bool = True
    """Error feedback: add the compression error of a step to the next step's gradient. Without it, values are scaled up
    so that decoding is unbiased."""

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import kept_bytes

        return kept_bytes(num_elements, self.ratio)

    @property
    def consensus_step(self) -> float:
        """Step size gamma for gossip, proportional to the ratio (Koloskova et al. 2019, arXiv:1902.00340, table 3)."""
        return min(0.5, 2.0 * self.ratio)

    def codec(self) -> Any:
        from shardscope.methods.compressors.randomk import _torch

        return (_torch.RandomKCodec if self.feedback else _torch.ScaledRandomKCodec)(self.ratio)
