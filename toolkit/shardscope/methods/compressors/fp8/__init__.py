"""8-bit floats (e4m3) with one scale per block (Micikevicius et al. 2022, arXiv:2209.05433)."""

from __future__ import annotations

from typing import Any

from shardscope.methods.compressors.packed import BlockIntegers
from shardscope.spec.look import MethodStyle


class FP8(BlockIntegers):
    """Rounds elements to 8-bit floats (e4m3), with one scale per block."""

    name = "fp8"
    family = "Shorter floats"
    look = MethodStyle("#7fb6e3", "dashdot", "square-open")

    @property
    def width(self) -> int:
        return 8

    def codec(self) -> Any:
        from shardscope.methods.compressors.fp8._torch import BlockFloat8

        return BlockFloat8(self.block)
