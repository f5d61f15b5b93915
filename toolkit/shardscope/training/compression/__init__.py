"""Gradient compression: codecs, what is remembered between steps, and how compressed gradients meet.

A method is one row of `METHODS`, which makes its compressor out of the job's `Compression`; most are a codec in a file
of its family and `Packed`. To add one: its codec or compressor in a file here, a row here and in
`shardscope.spec.compression`, its bytes in `shardscope.analytic.communication.compression`, and a row in the
conformance test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardscope.spec import Compression, Job
from shardscope.training.compression.adaptive_bits import AdaptiveBits
from shardscope.training.compression.adaptive_rank import AdaptiveRank
from shardscope.training.compression.blocks import BlockInt
from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.casts import Cast
from shardscope.training.compression.codec import Codec
from shardscope.training.compression.compressor import Carrier, Compressor, NotFinite
from shardscope.training.compression.dgc import MomentumCorrection, local_max_norm
from shardscope.training.compression.fp8 import BlockFloat8
from shardscope.training.compression.local_sgd import LocalSGD
from shardscope.training.compression.memory import ErrorFeedback
from shardscope.training.compression.natural import Natural
from shardscope.training.compression.onebit import OneBit
from shardscope.training.compression.packed import Packed
from shardscope.training.compression.powersgd import PowerSgd
from shardscope.training.compression.qsgd import Qsgd
from shardscope.training.compression.randomblock import RandomBlock, ScaledRandomBlock
from shardscope.training.compression.randomk import RandomK, ScaledRandomK
from shardscope.training.compression.signs import BlockSign, MajorityVote
from shardscope.training.compression.ternary import Ternary
from shardscope.training.compression.topk import TopK, WarmingTopK

Make = Callable[[Compression, Job], Compressor]


def _cast(dtype: torch.dtype) -> Make:
    # with loss scaling, an overflow is how the scale is found: it goes through, and the step is skipped
    return lambda spec, job: Packed(spec.name, Cast(dtype), carries_overflow=job.precision == "fp16")


def _coded(codec: Callable[[dict[str, Any]], Codec]) -> Make:
    """A codec made of the method's settings, with feedback and exchange as they are set."""

    def make(spec: Compression, _: Job) -> Compressor:
        settings = spec.settings
        feedback = settings.get("feedback", False)
        return Packed.of(spec.name, codec(settings), feedback=feedback, exchange=settings["exchange"])

    return make


def _onebit(spec: Compression, job: Job) -> Compressor:
    return OneBit(spec.name, BlockSign(spec.settings["block"]), spec.warmup(job.steps))


def _random_k(spec: Compression, _: Job) -> Compressor:
    settings = spec.settings
    codec = (RandomK if settings["feedback"] else ScaledRandomK)(settings["ratio"])
    return Packed.of(spec.name, codec, feedback=settings["feedback"])


def _random_block(spec: Compression, _: Job) -> Compressor:
    settings = spec.settings
    codec = (RandomBlock if settings["feedback"] else ScaledRandomBlock)(settings["ratio"], settings["block"])
    return Packed.of(spec.name, codec, feedback=settings["feedback"])


def _top_k(spec: Compression, _: Job) -> Compressor:
    settings = spec.settings
    codec = TopK(settings["ratio"], settings["selection"])
    return Packed.of(spec.name, codec, feedback=settings["feedback"], exchange=settings["exchange"])


def _dgc(spec: Compression, job: Job) -> Compressor:
    settings = spec.settings
    memory = MomentumCorrection(settings["momentum"], local_max_norm(settings["clip"], job.num_data_ranks))
    shares = ErrorFeedback("share") if settings["exchange"] == "two-phase" else None
    return Packed(spec.name, WarmingTopK(spec), memory=memory, shares=shares, exchange=settings["exchange"])


def _powersgd(spec: Compression, job: Job) -> Compressor:
    settings = spec.settings
    return PowerSgd(
        settings["rank"], feedback=settings["feedback"], seed=job.seed, warmup_steps=settings["warmup_steps"]
    )


def _adaptive_bits(spec: Compression, _: Job) -> Compressor:
    settings = spec.settings
    return AdaptiveBits(
        settings["budget"], settings["update_every"], block=settings["block"], feedback=settings["feedback"]
    )


def _adaptive_rank(spec: Compression, job: Job) -> Compressor:
    settings = spec.settings
    return AdaptiveRank(
        settings["rank"], settings["error"], settings["update_every"], feedback=settings["feedback"], seed=job.seed,
        warmup_steps=settings["warmup_steps"],
    )  # fmt: skip


METHODS: dict[str, Make] = {
    "fp16": _cast(torch.float16),
    "bf16": _cast(torch.bfloat16),
    "fp8": _coded(lambda settings: BlockFloat8(settings["block"])),
    "int8": _coded(lambda settings: BlockInt(8, settings["block"])),
    "int4": _coded(lambda settings: BlockInt(4, settings["block"])),
    "qsgd": _coded(lambda settings: Qsgd(settings["bits"], settings["block"])),
    "terngrad": _coded(lambda settings: Ternary(settings["clip"])),
    "natural": _coded(lambda _: Natural()),
    "sign": _coded(lambda settings: BlockSign(settings["block"])),
    "sign-vote": lambda spec, _: MajorityVote(spec.name),
    "onebit-adam": _onebit,
    "onebit-lamb": _onebit,
    "local-sgd": lambda spec, _: LocalSGD(spec.name, spec.settings["every"]),
    "randomk": _random_k,
    "randomblock": _random_block,
    "topk": _top_k,
    "dgc": _dgc,
    "powersgd": _powersgd,
    "adaptive-bits": _adaptive_bits,
    "adaptive-rank": _adaptive_rank,
}
"""What makes each method's compressor."""


def build_compressor(job: Job) -> Compressor | None:
    """The compressor of one rank of `job`; None where nothing is compressed."""
    return METHODS[job.compression.name](job.compression, job) if job.compression.is_on else None


__all__ = ["METHODS", "Bucket", "Carrier", "Compressor", "NotFinite", "build_compressor"]
