"""Half-precision casts at the end of their range: a mean that fits comes through, one that does not is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardscope as ss
from conformance.compressor import bucket_of, carrier_of, job_of, make
from conformance.ranks import RankPool
from shardscope.training.compression import NotFinite, build_compressor
from shardscope.training.context import RankContext

SHAPES = [(7,), (12, 4), (5,)]
"""Sixty elements: two, three and four ranks have equal shares."""
LARGE = 7 + 13


def large(context: RankContext, value: float, *, on: int | None = 0) -> torch.Tensor:
    """Ones, with a large element in the second tensor, on one rank or (None) on all."""
    flat = torch.ones(60)
    if on in (None, context.rank):
        flat[LARGE] = value
    return flat


def outcome(context: RankContext, method: str, flat: torch.Tensor) -> torch.Tensor | str:
    bucket = bucket_of(flat, shapes=SHAPES)
    try:
        make(ss.Compression(method), context).mean_(bucket, carrier_of(context))
    except NotFinite as error:
        return str(error)
    return bucket.flat


def test_a_mean_in_range_comes_through_though_a_gradient_is_not(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> list[torch.Tensor | str]:
        return [outcome(context, "fp16", large(context, 1e5)), outcome(context, "bf16", large(context, 1e6))]

    for half, brain in pool.run(body, tmp_path):
        for came, value, near in ((half, 1e5, 1e-3), (brain, 1e6, 1e-2)):
            mean = torch.ones(60)
            mean[LARGE] += (value - 1) / pool.world_size
            assert torch.allclose(came, mean, rtol=near, atol=0)


@pytest.mark.parametrize(("value", "on"), [(1e6, 0), (-1e6, 0), (1e5, None)], ids=["one", "minus", "all"])
def test_a_mean_out_of_range_is_refused_by_name_on_every_rank(
    pool: RankPool, tmp_path: Path, value: float, on: int | None
) -> None:
    """Also where each packet is in range, and only their sum is not."""

    def body(context: RankContext) -> torch.Tensor | str:
        return outcome(context, "fp16", large(context, value, on=on))

    for said in pool.run(body, tmp_path):
        assert said == (
            "the gradient of 'p1' is beyond the range of compression='fp16' at step 1; use compression='bf16'"
        )


def test_a_share_out_of_range_is_refused_by_the_rank_that_holds_it(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> str:
        bucket, share = bucket_of(large(context, 1e6), shapes=SHAPES), torch.empty(60 // context.world_size)
        try:
            make(ss.Compression("fp16"), context).scatter_mean(bucket, carrier_of(context), share)
        except NotFinite as error:
            return str(error)
        return "fits"

    said = pool.run(body, tmp_path)
    holder = LARGE // (60 // pool.world_size)
    assert [each == "fits" for each in said] == [rank != holder for rank in range(pool.world_size)]
    assert "'p1' is beyond the range" in said[holder]


@pytest.mark.ranks(2)
def test_a_packet_out_of_range_is_refused_and_loss_scaling_sees_its_infinity(
    pool: RankPool, tmp_path: Path
) -> None:
    def body(context: RankContext) -> tuple[str, torch.Tensor]:
        said = "fits"
        try:
            bucket = bucket_of(large(context, 1e5, on=None), shapes=SHAPES)
            make(ss.Compression("fp16"), context).pack(bucket, carrier_of(context))
        except NotFinite as error:
            said = str(error)
        job = job_of(ss.Compression("fp16"), 2).replace(precision="fp16-mixed")
        scaled = build_compressor(job)
        assert scaled is not None
        bucket = bucket_of(large(context, 1e6), shapes=SHAPES)
        scaled.mean_(bucket, carrier_of(context))
        return said, bucket.flat

    for said, came in pool.run(body, tmp_path):
        assert "'p1' is beyond the range of compression='fp16'" in said
        assert came.isinf().nonzero().tolist() == [[LARGE]]
