"""Base class of methods that send gradients as 16-bit floats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardscope.methods.compressors.packed import PackedCompression

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class HalfFloats(PackedCompression):
    """Base class of methods that round each element to a float of two bytes, so that packets can be all-reduced."""

    carriage = "sums"
    family = "Shorter floats"
    codec_passes = 1.0  # each element separately
    survives_overflow = True
    summed_width = 2

    dtype: ClassVar[Literal["float16", "bfloat16"]]
    """Name of the torch dtype."""

    def packet_bytes(self, num_elements: int) -> int:
        return 2 * num_elements

    def codec(self) -> Any:
        from shardscope.training.compression.casts import Cast

        return Cast(self.dtype)

    def build(self, job: Job) -> Any:
        """Build the compressor. With loss scaling, packets carry overflows, so that all ranks skip the step."""
        from shardscope.training.compression.packed import Packed

        return Packed(self.name, self.codec(), carries_overflow=job.precision == "fp16-mixed")
