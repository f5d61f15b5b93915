"""Base classes for gradient compression: codecs, error-feedback residuals, and averaging of compressed gradients.

Each compression method has its own folder in `shardscope.methods.compressors`. Most of them define a `Codec` and build
a `Packed` compressor from it.
"""

from __future__ import annotations

from shardscope.errors import SpecError, quoted
from shardscope.spec import Job
from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.compressor import Carrier, Compressor, NotFinite


def build_compressor(job: Job) -> Compressor | None:
    """Build the compressor for one rank of `job`, or return None if the job does not compress gradients.

    Raises:
        SpecError: The `build` method of a user-defined compression method returned neither a `Compressor` nor None.
    """
    built = job.compression.build(job)
    if built is not None and not isinstance(built, Compressor):
        raise SpecError(
            f"compression={job.compression.name!r}: its build method returned {quoted(built)}; return a "
            "shardscope.training.compression.Compressor, or None for no compression"
        )
    return built


__all__ = ["Bucket", "Carrier", "Compressor", "NotFinite", "build_compressor"]
