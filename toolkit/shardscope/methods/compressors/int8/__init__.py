"""8-bit integers with one scale per block (Dettmers et al. 2022, arXiv:2110.02861)."""

from __future__ import annotations

from typing import Any

from shardscope.methods.compressors.packed import BlockIntegers
from shardscope.spec.look import MethodStyle


class Int8(BlockIntegers):
    """Rounds elements to 8-bit integers, with one scale per block."""

    name = "int8"
    look = MethodStyle("#2a86d1", "solid", "square")

    @property
    def width(self) -> int:
        return 8

    def codec(self) -> Any:
        from shardscope.training.compression.blocks import BlockInt

        return BlockInt(self.width, self.block)
