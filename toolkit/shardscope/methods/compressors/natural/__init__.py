"""Natural compression: stochastic rounding to powers of two (Horvath et al. 2019, arXiv:1905.10988)."""

from __future__ import annotations

from typing import Any

from shardscope.methods.compressors.packed import Exchange, PackedCompression
from shardscope.spec.look import MethodStyle


class Natural(PackedCompression):
    """Sends the sign and exponent of each element, 9 bits, after unbiased stochastic rounding."""

    name = "natural"
    family = "Stochastic rounding"
    look = MethodStyle("#5f6fd6", "longdash", "diamond")
    codec_passes = 1.0  # each element separately

    exchange: Exchange = "two-phase"
    """How packets are exchanged: each rank averages a share of the elements (``two-phase``), or gets all packets
    (``gather``)."""

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import bits_bytes

        return num_elements + bits_bytes(num_elements, 1)

    def codec(self) -> Any:
        from shardscope.methods.compressors.natural._torch import NaturalCodec

        return NaturalCodec()
