"""What compressors share: codecs, what is remembered between steps, and how compressed gradients meet.

A method of compression stands in its folder of `shardscope.methods.compressors`; most are a `Codec` and `Packed`.
"""

from __future__ import annotations

from shardscope.errors import SpecError, quoted
from shardscope.spec import Job
from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.compressor import Carrier, Compressor, NotFinite


def build_compressor(job: Job) -> Compressor | None:
    """The compressor of one rank of `job`; None where nothing is compressed.

    Raises:
        SpecError: A method of the user's built something else.
    """
    built = job.compression.build(job)
    if built is not None and not isinstance(built, Compressor):
        raise SpecError(
            f"compression={job.compression.name!r} built {quoted(built)}; let it build a "
            "shardscope.training.compression.Compressor"
        )
    return built


__all__ = ["Bucket", "Carrier", "Compressor", "NotFinite", "build_compressor"]
