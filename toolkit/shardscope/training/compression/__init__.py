"""Shared parts of compressors: codecs, residuals between steps, and how compressed gradients are averaged.

Each compression method has its own folder in `shardscope.methods.compressors`; most are a `Codec` and `Packed`.
"""

from __future__ import annotations

from shardscope.errors import SpecError, quoted
from shardscope.spec import Job
from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.compressor import Carrier, Compressor, NotFinite


def build_compressor(job: Job) -> Compressor | None:
    """Build the compressor of one rank of `job`; None where nothing is compressed.

    Raises:
        SpecError: A user-defined method built an object that is not a `Compressor`.
    """
    built = job.compression.build(job)
    if built is not None and not isinstance(built, Compressor):
        raise SpecError(
            f"compression={job.compression.name!r} built {quoted(built)}; let it build a "
            "shardscope.training.compression.Compressor"
        )
    return built


__all__ = ["Bucket", "Carrier", "Compressor", "NotFinite", "build_compressor"]
