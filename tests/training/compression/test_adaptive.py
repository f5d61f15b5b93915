"""Bits and ranks that move: budgets held always, the same plan on all ranks, and a plan that follows the gradient."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardscope as ss
from conformance.compressor import CompressorConformance, bucket_of, carrier_of, sent_bytes
from conformance.ranks import RankPool
from shardscope.methods.compressors.adaptive_bits._torch import AdaptiveBitsCompressor, layer_of, spread_of
from shardscope.methods.compressors.adaptive_bits._torch_plan import LayerStatistics, allocate
from shardscope.methods.compressors.adaptive_rank._torch import AdaptiveRankCompressor, least_rank
from shardscope.training.compression import Bucket
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

SHAPES: list[tuple[int, ...]] = [(33, 17), (5,), (700,), (7, 3, 11), (1031,)]


class TestAdaptive(CompressorConformance):
    methods: ClassVar = [
        ss.Compression("adaptive-bits", update_every=1),
        ss.Compression("adaptive-bits", feedback=True, budget=2.5, update_every=2, block=64),
        ss.Compression("adaptive-rank", update_every=2),
        ss.Compression("adaptive-rank", rank=64, error=0.6, feedback=False),
    ]
    near: ClassVar = {"adaptive-bits": 0.8}


def flats(rank: int, step: int, scales: tuple[float, ...] = (1, 1, 1, 1, 1)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    return torch.cat(
        [scale * torch.randn(n, generator=generator) for n, scale in zip(sizes, scales, strict=True)]
    )


# Bits.

layers_of_any_kind = some.lists(
    some.tuples(some.integers(1, 10_000), some.floats(0, 1e12, allow_subnormal=False)),
    min_size=1,
    max_size=12,
).map(lambda rows: {f"layer{i}": LayerStatistics(*row) for i, row in enumerate(rows)})


def cost(layers: dict[str, LayerStatistics], bits: dict[str, int]) -> int:
    return sum(layer.size * bits[name] for name, layer in layers.items())


def error_of(layers: dict[str, LayerStatistics], bits: dict[str, int]) -> float:
    return sum(layer.spread / (2 ** (bits[name] - 1) - 1) ** 2 for name, layer in layers.items())


@settings(max_examples=200, deadline=None)
@given(layers_of_any_kind, some.floats(2, 8))
def test_bits_stay_within_the_budget(layers: dict[str, LayerStatistics], budget: float) -> None:
    bits = allocate(layers, budget)
    assert all(2 <= bits[name] <= 8 for name in layers)
    alike = dict.fromkeys(layers, math.floor(budget))
    assert error_of(layers, bits) <= error_of(layers, alike) * (1 + 1e-9)
    assert cost(layers, bits) <= budget * sum(layer.size for layer in layers.values()) * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    some.lists(some.tuples(some.integers(1, 30), some.floats(0.01, 1e4)), min_size=1, max_size=4),
    some.floats(2, 8),
)
def test_bits_leave_the_least_error_but_for_the_last_that_do_not_fit(
    rows: list[tuple[int, float]], budget: float
) -> None:
    """Against all plans there are. Layers of one size always fit, and then the greedy plan is the best of all."""
    for sizes in ([size for size, _ in rows], [7] * len(rows)):
        layers = {
            f"l{i}": LayerStatistics(size, row[1])
            for i, (size, row) in enumerate(zip(sizes, rows, strict=True))
        }
        room = math.floor((budget - 2) * sum(sizes)) + 2 * sum(sizes)
        plans = (
            dict(zip(layers, choice, strict=True))
            for choice in itertools.product(range(2, 9), repeat=len(layers))
        )
        best = min(error_of(layers, plan) for plan in plans if cost(layers, plan) <= room)
        ours = allocate(layers, budget)
        if len(set(sizes)) == 1:
            assert error_of(layers, ours) <= best * (1 + 1e-9)
        refused = [name for name in layers if ours[name] < 8]
        slack = max((layers[name].size * layers[name].gain(ours[name]) for name in refused), default=0.0)
        assert error_of(layers, ours) <= best + slack + 1e-9 * best


def test_spread_is_the_error_of_rounding() -> None:
    """A twelfth of a squared step an element, held against rounding itself."""
    values = torch.rand(64 * 256 - 100, generator=torch.Generator().manual_seed(0)) - 0.5
    for bits in (5, 8):
        steps = 2 ** (bits - 1) - 1
        error = 0.0
        for block in values.double().split(256):
            scale = block.abs().max() / steps
            error += float((block - scale * (block / scale).round()).square().sum())
        assert spread_of(values, 256) / (12 * steps**2) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("feedback", [False, True])
def test_bits_move_to_the_layer_whose_gradient_grows(feedback: bool, pool: RankPool, tmp_path: Path) -> None:
    """The same on all ranks, within the budget, with bytes as the plan says, and nothing lost where it is fed back."""
    compression = ss.Compression("adaptive-bits", update_every=2, feedback=feedback, block=64, budget=4.5)
    scales = [(1.0, 1.0, 1.0, 1.0, 1.0)] * 2 + [(1.0, 1.0, 30.0, 1.0, 1.0)] * 3

    def body(context: RankContext) -> dict[str, Any]:
        compressor = AdaptiveBitsCompressor(4.5, 2, block=64, feedback=feedback)
        plans, arrived, sent = [], torch.zeros_like(flats(0, 1)), []
        for step, scale in enumerate(scales, start=1):
            compressor.begin_step(step)
            bucket = bucket_of(flats(context.rank, step, scale), step, SHAPES)
            context.meter.drain()
            compressor.mean_(bucket, carrier_of(context))
            sent.append(sent_bytes(context))
            plans.append([compressor.bits_of(name) for name in bucket.names])
            arrived += bucket.flat
        kept = compressor.state_dict()
        owed = torch.cat([kept[f"residual.p{i}"] for i in range(5)]) if feedback else arrived * 0
        return {"plans": plans, "arrived": arrived, "sent": sent, "owed": owed, "mean": compressor.mean_bits}

    results = pool.run(body, tmp_path)
    plans = results[0]["plans"]
    assert all(result["plans"] == plans for result in results)
    assert plans[0] == plans[1] == [4] * 5
    assert plans[4][2] > plans[2][2]
    assert plans[4][4] < plans[2][4]
    assert 4 < results[0]["mean"] <= 4.5
    for rank, result in enumerate(results):
        expected = [compression.bucket_bytes(SHAPES, pool.world_size, plan=plan)[rank] for plan in plans]
        assert result["sent"] == expected
    if feedback:
        given_ = sum(
            flats(r, s, scale) for r in range(pool.world_size) for s, scale in enumerate(scales, start=1)
        )
        owed = sum(result["owed"] for result in results)
        assert torch.allclose(
            pool.world_size * results[0]["arrived"] + owed, torch.as_tensor(given_), atol=1e-3
        )


def test_a_module_is_a_layer() -> None:
    assert [layer_of(name) for name in ("blocks.0.fc.weight", "blocks.0.fc.bias", "scale")] == [
        "blocks.0.fc", "blocks.0.fc", "scale",
    ]  # fmt: skip


# Ranks.


def with_decay(decay: float, seed: int, rows: int = 60, columns: int = 48) -> torch.Tensor:
    """A matrix whose singular values are 1, decay, decay^2, ..."""
    generator = torch.Generator().manual_seed(seed)
    size = min(rows, columns)
    left, right = (torch.linalg.qr(torch.randn(n, size, generator=generator))[0] for n in (rows, columns))
    return left @ torch.diag(decay ** torch.arange(size)) @ right.T


@settings(max_examples=100, deadline=None)
@given(some.lists(some.floats(0, 1e3), min_size=1, max_size=10), some.floats(0, 1e3), some.floats(0.01, 0.99))
def test_the_least_rank_is_the_least(values: list[float], tail: float, error: float) -> None:
    squares = sorted(values, reverse=True)
    rank = least_rank(torch.tensor(squares, dtype=torch.float64), tail, error)
    total = sum(squares) + tail
    missed = [math.fsum(squares[k:]) + tail for k in range(len(squares) + 1)]
    near = 1e-9 * total
    if rank < len(squares):
        assert missed[rank] <= error**2 * total + near
    if rank > 1:
        assert missed[rank - 1] >= error**2 * total - near


@pytest.mark.parametrize("shape", [(60, 48), (20, 14)])
def test_ranks_follow_the_spectrum(shape: tuple[int, int], pool: RankPool, tmp_path: Path) -> None:
    """A slowly falling spectrum, then a steep one; the second shape is too small for the largest rank to pay."""
    error, every = 0.3, 6
    slow, steep = (with_decay(decay, 3, *shape) for decay in (0.75, 0.25))
    compression = ss.Compression("adaptive-rank", rank=9, error=error, update_every=every)

    def body(context: RankContext) -> dict[str, Any]:
        compressor = AdaptiveRankCompressor(9, error, every, feedback=False, seed=1)
        ranks, errors, sent = [], [], []
        for step in range(1, 3 * every + 1):
            mean = slow if step <= every + 1 else steep
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            own = mean + noise if context.rank == 0 else mean - noise if context.rank == 1 else mean
            bucket = bucket_of(own.flatten().clone(), step, [shape])
            context.meter.drain()
            compressor.mean_(bucket, carrier_of(context))
            sent.append(sent_bytes(context))
            ranks.append(compressor.plan["p0"])
            errors.append(float((bucket.flat.view(shape) - mean).norm() / mean.norm()))
        return {"ranks": ranks, "errors": errors, "sent": sent}

    results = pool.run(body, tmp_path)
    ranks, errors = results[0]["ranks"], results[0]["errors"]
    assert all(result["ranks"] == ranks for result in results)
    for matrix, at in ((slow, every), (steep, 2 * every)):
        squares = torch.linalg.svdvals(matrix.double()).square()
        fits = [k for k in range(1, 10) if float(squares[k:].sum() / squares.sum()) <= error**2]
        assert abs(ranks[at] - fits[0]) <= (1 if shape == (60, 48) else 0)
    assert ranks[every] > ranks[2 * every]
    assert errors[every - 1] <= 1.2 * error
    for rank, result in enumerate(results):
        plans = [None if k % every == 0 else [ranks[k]] for k in range(len(ranks))]
        expected = [compression.bucket_bytes([shape], pool.world_size, plan=plan)[rank] for plan in plans]
        assert result["sent"] == expected
    assert np.mean(results[0]["sent"][-every + 1 :]) < results[0]["sent"][0]


@pytest.mark.parametrize(("error", "rank"), [(0.45, 4), (0.7, 1)])
def test_what_all_directions_miss_counts(error: float, rank: int, pool: RankPool, tmp_path: Path) -> None:
    """One direction of energy 1 and 40 of 0.5 together: one alone is off by 0.577, four of them by 0.556."""
    energies = torch.tensor([1.0] + [0.5 / 40] * 40)
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.linalg.qr(torch.randn(n, 41, generator=generator))[0] for n in (60, 48))
    matrix = left @ torch.diag(energies.sqrt()) @ right.T

    def body(context: RankContext) -> dict[str, int]:
        compressor = AdaptiveRankCompressor(4, error, 1, feedback=False, seed=1)
        for step in (1, 2, 3):
            compressor.mean_(bucket_of(matrix.flatten().clone(), step, [(60, 48)]), carrier_of(context))
        return compressor.plan

    assert pool.run(body, tmp_path) == [{"p0": rank}] * pool.world_size


def test_no_gradient_takes_one_direction_and_none_goes_past_the_largest(
    pool: RankPool, tmp_path: Path
) -> None:
    noise = torch.randn(60, 48, generator=torch.Generator().manual_seed(5))

    def body(context: RankContext) -> list[dict[str, int]]:
        compressor = AdaptiveRankCompressor(4, 0.1, 1, feedback=True, seed=1)
        plans = []
        for step, matrix in enumerate((torch.zeros(60, 48), noise), start=1):
            bucket = bucket_of(torch.cat([matrix.flatten(), torch.ones(3)]), step, [(60, 48), (3,)])
            compressor.mean_(bucket, carrier_of(context))
            plans.append(compressor.plan)
        return plans

    assert pool.run(body, tmp_path) == [[{"p0": 1}, {"p0": 4}]] * pool.world_size


@pytest.mark.parametrize("name", ["adaptive-bits", "adaptive-rank"])
def test_a_real_model_trains_in_many_buckets_and_tells_its_plan(
    name: str, pool: RankPool, tmp_path: Path
) -> None:
    job = ss.Job(
        model="gpt-nano", data="python-source", batch=12, steps=5, world_size=pool.world_size, seed=1,
        strategy={"name": "ring", "bucket_mb": 0.05}, compression=ss.Compression(name, update_every=2),
    )  # fmt: skip

    def body(context: RankContext) -> dict[str, Any]:
        trainer = Trainer(job, context, context.events.path.parent)
        compressor = trainer.strategy.compressor
        assert compressor is not None
        seen: list[tuple[int, list[int] | None, list[tuple[int, ...]]]] = []
        whole = compressor.mean_

        def mean_(bucket: Bucket, carrier: Any) -> None:
            if isinstance(compressor, AdaptiveBitsCompressor):
                plan: list[int] | None = [compressor.bits_of(n) for n in bucket.names]
            else:
                looks = bucket.step % 2 == 1
                plan = None if looks else [compressor.plan.get(n, 0) for n in bucket.names]
            seen.append((bucket.step, plan, [tuple(s) for s in bucket.shapes]))
            whole(bucket, carrier)

        compressor.mean_ = mean_  # type: ignore[method-assign]
        losses = [trainer.take_step(step) for step in range(1, job.steps + 1)]
        trainer.strategy.close()
        parameters = [p.detach().clone() for p in trainer.model.parameters()]
        return {"losses": losses, "seen": seen, "plan": compressor.plan, "parameters": parameters}

    results = pool.run(body, tmp_path)
    for rank, result in enumerate(results):
        assert result["plan"] == results[0]["plan"]
        assert all(map(torch.equal, result["parameters"], results[0]["parameters"]))
        lines = (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        for event in (e for e in events if e["event"] == "step"):
            expected = sum(
                int(job.compression.bucket_bytes(shapes, pool.world_size, plan=plan)[rank])
                for at, plan, shapes in result["seen"]
                if at == event["step"]
            )
            ours = {"ring_all_reduce", "packet_all_to_all", "packet_all_gather"}
            rows = [row for what, row in event["traffic"].items() if what in ours]
            assert sum(row["sent_bytes"] for row in rows) == expected
        told = [e["plan"] for e in events if e["event"] == "plan"]
        assert (told[-1:] == [result["plan"]]) == (rank == 0)
    losses = [sum(r["losses"][step] for r in results) for step in (0, -1)]
    assert losses[1] < losses[0]
