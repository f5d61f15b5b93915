"""Random-k with whole blocks, which are faster to pack than single elements (Stich et al. 2018, arXiv:1809.07599)."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from shardscope.methods.compressors.packed import PackedCompression, Ratio, check_block
from shardscope.spec.look import MethodStyle


class RandomBlock(PackedCompression):
    """Sends the values of randomly drawn blocks; all ranks draw the same blocks, so no indices are sent."""

    name = "randomblock"
    carriage = "sums"
    family = "Sparsification"
    look = MethodStyle("#e06c2c", "dash", "diamond-wide")
    codec_passes = 0.0  # reads only the blocks that it sends
    summed_width = 4

    ratio: Ratio = 0.01
    """Fraction of the blocks to send, 0 < value <= 1."""
    feedback: bool = True
    """Error feedback: add the compression error of a step to the next step's gradient. Without it, values are scaled up
    so that decoding is unbiased."""
    block: int = Field(default=256, ge=8, le=65536)
    """Number of elements in a block: a multiple of 8, from 8 to 65536."""

    @model_validator(mode="after")
    def _check_block(self) -> Self:
        check_block(self.block)
        return self

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import FLOAT_BYTES, kept_elements, num_blocks

        kept = int(kept_elements(num_blocks(num_elements, self.block), self.ratio))
        return FLOAT_BYTES * min(num_elements, kept * self.block)

    @property
    def align(self) -> int:
        return self.block

    @property
    def consensus_step(self) -> float:
        """Step size gamma for gossip, proportional to the ratio (Koloskova et al. 2019, arXiv:1902.00340, table 3)."""
        return min(0.5, 2.0 * self.ratio)

    def codec(self) -> Any:
        from shardscope.methods.compressors.randomblock import _torch

        return (_torch.RandomBlockCodec if self.feedback else _torch.ScaledRandomBlockCodec)(
            self.ratio, self.block
        )
