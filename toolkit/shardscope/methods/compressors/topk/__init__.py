"""Top-k: the largest elements and their indices (Lin et al. 2018, arXiv:1712.01887; Stich et al. 2018)."""

from __future__ import annotations

from typing import Any, Literal

from shardscope.methods.compressors.packed import Exchange, PackedCompression, Ratio
from shardscope.spec.look import Look


class TopK(PackedCompression):
    """Sends the largest elements with their indices; the others stay in the residual."""

    name = "topk"
    family = "Some of the elements"
    look = Look("#e06c2c", "solid", "diamond")
    codec_passes = 4.0  # of a radix selection

    ratio: Ratio = 0.01
    """Share of the elements that are sent, 0 < value <= 1."""
    feedback: bool = True
    """Error feedback: what a step leaves out is added to the next step's gradient."""
    selection: Literal["sampled", "exact"] = "sampled"
    """Find the threshold in a sample of the elements, or sort all of them."""
    exchange: Exchange = "gather"
    """How packets are exchanged: ``two-phase`` or ``gather``."""

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import placed_bytes

        return placed_bytes(num_elements, self.ratio)

    @property
    def consensus_step(self) -> float:
        """Consensus step of gossip, in proportion to the ratio (Koloskova et al. 2019, arXiv:1902.00340, table 3)."""
        return min(0.5, 4.0 * self.ratio)

    def codec(self) -> Any:
        from shardscope.methods.compressors.topk._torch import TopKCodec

        return TopKCodec(self.ratio, self.selection)
