"""Natural compression: stochastic rounding to powers of two (Horvath et al. 2019, arXiv:1905.10988)."""

from __future__ import annotations

from typing import Any

from shardscope.methods.compressors.packed import Exchange, PackedCompression
from shardscope.spec.look import Look


class Natural(PackedCompression):
    """Sign and exponent, 9 bits per element, with unbiased stochastic rounding."""

    name = "natural"
    family = "Random rounding"
    look = Look("#5f6fd6", "longdash", "diamond")
    codec_passes = 1.0  # each number by itself

    exchange: Exchange = "two-phase"
    """How packets are exchanged: ``two-phase`` or ``gather``."""

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import bits_bytes

        return num_elements + bits_bytes(num_elements, 1)

    def codec(self) -> Any:
        from shardscope.methods.compressors.natural._torch import NaturalCodec

        return NaturalCodec()
