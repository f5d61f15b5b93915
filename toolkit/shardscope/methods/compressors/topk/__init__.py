"""Top-k: send the elements of largest magnitude (Lin et al. 2018, arXiv:1712.01887; Stich et al. 2018)."""

from __future__ import annotations

from typing import Any, Literal

from shardscope.methods.compressors.packed import Exchange, PackedCompression, Ratio
from shardscope.spec.look import MethodStyle


class TopK(PackedCompression):
    """Sends the elements of largest magnitude with their indices; all others stay in the residual."""

    name = "topk"
    family = "Sparsification"
    look = MethodStyle("#e06c2c", "solid", "diamond")
    codec_passes = 4.0  # passes of a radix selection

    ratio: Ratio = 0.01
    """Fraction of the elements to send, 0 < value <= 1."""
    feedback: bool = True
    """Error feedback: add the compression error of a step to the next step's gradient."""
    selection: Literal["sampled", "exact"] = "sampled"
    """Search for the largest elements: with a threshold from a sample (``sampled``), or by comparing all elements
    (``exact``). Both give the same result."""
    exchange: Exchange = "gather"
    """How packets are exchanged: each rank averages a share of the elements (``two-phase``), or gets all packets
    (``gather``)."""

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import placed_bytes

        return placed_bytes(num_elements, self.ratio)

    @property
    def consensus_step(self) -> float:
        """Step size gamma for gossip, proportional to the ratio (Koloskova et al. 2019, arXiv:1902.00340, table 3)."""
        return min(0.5, 4.0 * self.ratio)

    def codec(self) -> Any:
        from shardscope.methods.compressors.topk._torch import TopKCodec

        return TopKCodec(self.ratio, self.selection)
