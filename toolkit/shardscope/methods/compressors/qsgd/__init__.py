"""QSGD: stochastically rounded integers in blocks (Alistarh et al. 2017, arXiv:1610.02132, without entropy coding)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from shardscope.methods.compressors.packed import BlockCompression, Exchange
from shardscope.spec.look import MethodStyle


class Qsgd(BlockCompression):
    """Unbiased stochastic rounding of each element to one of its two adjacent levels."""

    name = "qsgd"
    family = "Stochastic rounding"
    look = MethodStyle("#5f6fd6", "dot", "square-open")
    codec_passes = 2.0  # one to find the scales, one to round

    bits: Annotated[int, Field(ge=2, le=8)] = 8
    """Bits per element, including the sign: 2 to 8."""
    exchange: Exchange = "two-phase"
    """How packets are exchanged: each rank averages a share of the elements (``two-phase``), or gets all packets
    (``gather``)."""

    @property
    def width(self) -> int:
        return self.bits

    @property
    def diverges_because(self) -> str | None:
        """Error message if gossip would diverge with so few bits; None if there are enough bits.

        Rounding adds a variance of at most a quarter of the squared distance between levels to each element.
        """
        least = next(bits for bits in range(2, 64) if (2**bits - 2) ** 2 > self.block)
        if self.bits >= least:
            return None
        return (
            f"compression.bits={self.bits} with block={self.block} cannot be combined with strategy='gossip': the "
            f"rounding noise exceeds the differences between ranks; use bits={least} or a smaller block"
        )

    def codec(self) -> Any:
        from shardscope.methods.compressors.qsgd._torch import QsgdCodec

        return QsgdCodec(self.bits, self.block)
