"""Gradient compression: codecs, what is remembered between steps, and how compressed gradients meet.

A method is one row of `METHODS`, which makes its compressor out of the job's `Compression`; most are a codec in a file
of its family and `Packed`. To add one: its codec or compressor in a file here, a row here and in
`shardscope.spec.compression`, its bytes in `shardscope.analytic.communication.compression`, and a row in the
conformance test.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardscope.spec import Compression, Job
from shardscope.training.compression.blocks import BlockInt
from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.casts import Cast
from shardscope.training.compression.compressor import Carrier, Compressor, NotFinite
from shardscope.training.compression.packed import Packed

Make = Callable[[Compression, Job], Compressor]


def _cast(dtype: torch.dtype) -> Make:
    return lambda spec, _: Packed(spec.name, Cast(dtype))


def _block_int(bits: int) -> Make:
    def make(spec: Compression, _: Job) -> Compressor:
        settings = spec.settings
        codec = BlockInt(bits, settings["block"])
        return Packed.of(spec.name, codec, feedback=settings["feedback"], exchange=settings["exchange"])

    return make


METHODS: dict[str, Make] = {
    "fp16": _cast(torch.float16),
    "bf16": _cast(torch.bfloat16),
    "int8": _block_int(8),
    "int4": _block_int(4),
}
"""What makes each method's compressor."""


def build_compressor(job: Job) -> Compressor | None:
    """The compressor of one rank of `job`; None where nothing is compressed."""
    return METHODS[job.compression.name](job.compression, job) if job.compression.is_on else None


__all__ = ["METHODS", "Bucket", "Carrier", "Compressor", "NotFinite", "build_compressor"]
