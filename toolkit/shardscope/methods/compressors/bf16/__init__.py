"""Gradients in bfloat16, two bytes per element, summed during the all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.methods.compressors.packed import PackedCompression
from shardscope.spec.look import MethodStyle

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class BF16(PackedCompression):
    """Rounds each element to the nearest bfloat16 number."""

    name = "bf16"
    carriage = "sums"
    family = "Shorter floats"
    look = MethodStyle("#8b8f99", "dot", "circle")
    codec_passes = 1.0  # each element separately
    survives_overflow = True
    summed_width = 2

    def packet_bytes(self, num_elements: int) -> int:
        return 2 * num_elements

    def codec(self) -> Any:
        from shardscope.methods.compressors.bf16._torch import codec

        return codec()

    def build(self, job: Job) -> Any:
        """Build the compressor. With loss scaling, it transmits overflows, so that all ranks skip the step."""
        from shardscope.training.compression.packed import Packed

        return Packed(self.name, self.codec(), carries_overflow=job.precision == "fp16-mixed")
