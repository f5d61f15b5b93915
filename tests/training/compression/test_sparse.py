"""The sparse methods on real ranks: random-k, random-block, top-k and Deep Gradient Compression."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

import shardscope as ss
from conformance.compressor import (
    SHAPES,
    CompressorConformance,
    bucket_of,
    carrier_of,
    exchange,
    gradients,
    make,
    sent_bytes,
)  # fmt: skip
from conformance.ranks import RankPool
from shardscope.methods.compressors.dgc._torch import MomentumCorrection
from shardscope.training.compression import Bucket
from shardscope.training.context import RankContext


class TestRandom(CompressorConformance):
    methods: ClassVar = [
        ss.Compression("randomk", ratio=0.1),
        ss.Compression("randomk", ratio=0.1, feedback=False),
        ss.Compression("randomk", ratio=1.0),
        ss.Compression("randomblock", ratio=0.1, block=32),
        ss.Compression("randomblock", ratio=0.1, block=32, feedback=False),
    ]


class TestTopK(CompressorConformance):
    methods: ClassVar = [
        ss.Compression("topk"),
        ss.Compression("topk", ratio=0.3, selection="exact"),
        ss.Compression("topk", ratio=0.1, exchange="two-phase"),
        ss.Compression("topk", ratio=0.1, feedback=False),
    ]


class TestDeepGradientCompression(CompressorConformance):
    methods: ClassVar = [
        ss.Compression("dgc", ratio=0.01),
        ss.Compression("dgc", ratio=0.01, warmup_steps=3, clip=5.0),
        ss.Compression("dgc", ratio=0.1, exchange="two-phase"),
        ss.Compression("dgc", ratio=0.1, momentum=0.0),
    ]

    def expected_bytes(self, compression: ss.Compression, world_size: int) -> list[int]:
        return list(compression.at_step(1).bucket_bytes(SHAPES, world_size))


@pytest.mark.parametrize(
    "compression",
    [
        ss.Compression("randomk", ratio=0.05),
        ss.Compression("randomblock", ratio=0.05, block=16),
        ss.Compression("topk"),
        ss.Compression("topk", exchange="two-phase"),
        ss.Compression("dgc", ratio=0.01, momentum=0.0),
    ],
    ids=lambda c: c.label,
)
def test_what_has_come_and_what_is_still_kept_are_all_gradients_so_far(
    compression: ss.Compression, pool: RankPool, tmp_path: Path
) -> None:
    steps = range(1, 6)

    def body(context: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
        compressor = make(compression, context)
        come = sum(exchange(compressor, context, gradients(context.rank, step), step) for step in steps)
        state = compressor.state_dict()
        kept = torch.cat(
            [
                state[key]
                for i in range(len(SHAPES))
                for key in (f"residual.p{i}", f"unsent.p{i}")
                if key in state
            ]
        )
        shares = [value for key, value in state.items() if key.startswith("share")]
        return torch.as_tensor(come), torch.stack([kept, _placed(shares, context, kept.numel())])

    results = pool.run(body, tmp_path)
    total = sum(gradients(rank, step).double() for rank in range(pool.world_size) for step in steps)
    residuals = sum(kept.double()[0] for _, kept in results)
    shares = sum(kept.double()[1] for _, kept in results)  # of the mean, not of the sum
    assert isinstance(residuals, torch.Tensor)
    come = results[0][0].double() + shares
    assert (come * pool.world_size + residuals - total).norm() <= 1e-6 * total.norm()


def _placed(shares: list[torch.Tensor], context: RankContext, count: int) -> torch.Tensor:
    """What this rank keeps of its share of the mean, where it belongs in the whole."""
    own = torch.cat(shares) if shares else torch.zeros(0)  # cut along the tensors it is of
    whole = torch.zeros(count + own.numel() * context.world_size)
    whole[context.rank * own.numel() :][: own.numel()] = own
    return whole[:count]


def test_the_bytes_of_a_warming_ratio_are_those_of_each_step(pool: RankPool, tmp_path: Path) -> None:
    compression = ss.Compression("dgc", ratio=0.01, warmup_steps=3)

    def body(context: RankContext) -> list[int]:
        compressor, sent = make(compression, context), []
        context.meter.drain()
        for step in range(1, 6):
            exchange(compressor, context, gradients(context.rank, step), step)
            sent.append(sent_bytes(context))
        return sent

    expected = [
        int(compression.at_step(step).bucket_bytes(SHAPES, pool.world_size)[0]) for step in range(1, 6)
    ]
    assert pool.run(body, tmp_path)[0] == expected
    assert expected == sorted(expected, reverse=True)
    assert expected[3] == expected[4] < expected[2]


def test_random_k_sends_the_same_places_on_all_ranks_and_other_ones_each_step(
    pool: RankPool, tmp_path: Path
) -> None:
    compression = ss.Compression("randomk", ratio=0.1, feedback=False)

    def body(context: RankContext) -> list[torch.Tensor]:
        compressor = make(compression, context)
        return [
            exchange(compressor, context, torch.full_like(gradients(0), 1.0 + context.rank), step) != 0
            for step in (1, 2)
        ]

    for first, second in pool.run(body, tmp_path):
        assert int(first.sum()) == int(second.sum()) == round(0.1 * first.numel())
        assert not torch.equal(first, second)


def test_at_a_ratio_of_one_dgc_is_momentum_sgd_by_itself(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> list[torch.Tensor]:
        compressor = make(ss.Compression("dgc", ratio=1.0, momentum=0.0), context)
        return [exchange(compressor, context, gradients(context.rank, step), step) for step in (1, 2)]

    come = pool.run(body, tmp_path)[0]
    for step, got in enumerate(come, start=1):
        mean = sum(gradients(rank, step) for rank in range(pool.world_size)) / pool.world_size
        torch.testing.assert_close(got, mean, rtol=1e-6, atol=1e-7)


def test_two_buckets_draw_apart(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> list[torch.Tensor]:
        compressor = make(ss.Compression("randomk", ratio=0.1), context)
        found = []
        for name in ("first", "second"):
            bucket = Bucket([name], [torch.Size([500])], torch.ones(500), 1)
            compressor.mean_(bucket, carrier_of(context))
            found.append(bucket.flat != 0)
        return found

    first, second = pool.run(body, tmp_path)[0]
    assert not torch.equal(first, second)


class TestMomentumCorrection:
    """Held against the recurrence as the paper prints it, an element at a time."""

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_it_follows_the_paper_element_by_element(self, momentum: float) -> None:
        memory = MomentumCorrection(momentum)
        count = sum(torch.Size(shape).numel() for shape in SHAPES)
        u, v = [0.0] * count, [0.0] * count
        for step in range(1, 8):
            flat = gradients(0, step)
            values = memory.before(bucket_of(flat, step))
            for i, g in enumerate(flat.tolist()):
                u[i] = momentum * u[i] + g
                v[i] += u[i]
            torch.testing.assert_close(
                values.double(), torch.tensor(v, dtype=torch.float64), rtol=1e-4, atol=1e-4
            )
            sent = values.abs() >= values.abs().quantile(0.9)
            memory.after(bucket_of(flat, step), values, torch.where(sent, values, 0.0))
            for i in sent.nonzero().view(-1).tolist():
                u[i] = v[i] = 0.0
            assert not values[sent].any()

    def test_it_clips_each_tensor_of_this_rank_and_leaves_the_bucket_alone(self) -> None:
        flat = torch.cat([torch.full((4,), 3.0), torch.full((4,), 0.1)])  # norms 6 and 0.2
        bucket = Bucket(["large", "small"], [torch.Size([4]), torch.Size([2, 2])], flat.clone(), 1)
        values = MomentumCorrection(0.9, max_norm=2.0).before(bucket)
        assert torch.allclose(values, torch.cat([torch.full((4,), 1.0), torch.full((4,), 0.1)]))
        assert torch.equal(bucket.flat, flat)
