"""Sign compression with one magnitude per block and error feedback (Karimireddy et al. 2019, arXiv:1901.09847)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shardscope.methods.compressors.packed import BlockCompression, Exchange
from shardscope.spec.look import MethodStyle


class Sign(BlockCompression):
    """Sends the sign of each element (one bit) and the mean magnitude of each block."""

    name = "sign"
    family = "Signs"
    look = MethodStyle("#b866a6", "solid", "triangle-up")
    codec_passes = 2.0  # one to find the magnitudes, one for the signs

    block: int = Field(default=1024, ge=8, le=65536)
    """Number of elements that share one magnitude: a multiple of 8, from 8 to 65536."""
    feedback: bool = True
    """Error feedback: add the compression error of a step to the next step's gradient."""
    exchange: Exchange = "two-phase"
    """How packets are exchanged: each rank averages a share of the elements (``two-phase``), or gets all packets
    (``gather``)."""

    @property
    def width(self) -> int:
        return 1

    @property
    def consensus_step(self) -> float:
        return 0.5

    def codec(self) -> Any:
        from shardscope.methods.compressors.sign._torch import BlockSign

        return BlockSign(self.block)
