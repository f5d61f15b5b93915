"""TernGrad: send each element as -1, 0 or +1, with one scale per packet (Wen et al. 2017, arXiv:1705.07878)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shardscope.methods.compressors.packed import Exchange, PackedCompression
from shardscope.spec.look import MethodStyle


class TernGrad(PackedCompression):
    """Sends two bits per element, after clipping outliers and unbiased stochastic rounding."""

    name = "terngrad"
    family = "Stochastic rounding"
    look = MethodStyle("#5f6fd6", "dashdot", "diamond-open")
    codec_passes = 3.0  # one for the deviation, one for the scale, one to round

    clip: float = Field(default=2.5, gt=0)
    """Clipping threshold for elements, in standard deviations of the packet's elements, above 0."""
    exchange: Exchange = "two-phase"
    """How packets are exchanged: each rank averages a share of the elements (``two-phase``), or gets all packets
    (``gather``)."""

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import FLOAT_BYTES, bits_bytes

        return FLOAT_BYTES + bits_bytes(num_elements, 2)

    @property
    def diverges_because(self) -> str:
        return self.is_too_coarse()

    def codec(self) -> Any:
        from shardscope.methods.compressors.terngrad._torch import Ternary

        return Ternary(self.clip)
