"""What ZeRO moves and what it holds, measured against the formulas to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.sharded import jagged, units
from conformance.strategy import job
from shardscope.analytic import communication as comm
from shardscope.analytic import sharding
from shardscope.training.context import RankContext
from shardscope.training.sharding import local
from shardscope.training.trainer import Trainer

ALL = ["zero-1", "zero-2", "zero-3"]
ITEM = 8  # bytes of an element, in fp64


def even() -> nn.Module:
    """Rows that 2, 3 and 4 ranks divide."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.Linear(96, 48), nn.Linear(48, 12))


def steps_of(context: RankContext, ours: ss.Job) -> tuple[Trainer, list[dict[str, Any]]]:
    """Two steps; the trainer and their events."""
    trainer = Trainer(ours, context, context.events.path.parent)
    for step in (1, 2):
        trainer.take_step(step)
    rows = [json.loads(line) for line in context.events.path.read_text().splitlines()]
    return trainer, [row for row in rows if row["event"] == "step"][-2:]


def sent(event: dict[str, Any]) -> int:
    return sum(row["sent_bytes"] for row in event["traffic"].values())


def job_of(strategy: Any, world_size: int, micro_batches: int = 1, **changes: Any) -> ss.Job:
    batch = ss.Batch(48, micro_batch=48 // world_size // micro_batches)
    fields = {"model": jagged, "data": "digits", "optimizer": "adamw", "batch": batch, **changes}
    return job(strategy=strategy, world_size=world_size, **fields)


def formula(trainer: Trainer, micro_batches: int) -> int:
    strategy, world = trainer.job.strategy, trainer.job.world_size
    if strategy.name == "zero-1":
        buckets = [sum(p.numel() for _, p in bucket.named) for bucket in trainer.strategy.buckets]
        by_rank = comm.flat_shards_traffic(buckets, world, comm.ShardCollectives(ITEM))
    else:
        by_rank = comm.fully_sharded_traffic(
            units(trainer), world, comm.ShardCollectives(ITEM), gathers=strategy.gathers(2 * micro_batches),
            replicas=strategy.replicas, micro_batches=micro_batches,
        )  # fmt: skip
    return int(comm.sent_bytes(by_rank)[trainer.context.rank])


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("strategy", [ss.Zero1(bucket_mb=0.005), ss.Zero2(), ss.Zero3()], ids=ALL)
def test_bytes_are_those_of_the_formula(
    pool: RankPool, tmp_path: Path, strategy: Any, micro_batches: int
) -> None:
    if 48 // pool.world_size % micro_batches:
        micro_batches = 2

    def measure(context: RankContext) -> list[tuple[int, int]]:
        trainer, events = steps_of(context, job_of(strategy, context.world_size, micro_batches))
        trainer.strategy.close()
        return [(sent(event), formula(trainer, micro_batches)) for event in events]

    for rank in pool.run(measure, tmp_path):
        assert all(measured == expected > 0 for measured, expected in rank), rank


@pytest.mark.ranks(4)  # two replicas of two shards are four ranks
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", [ss.Zero2, ss.Zero3])
def test_bytes_with_replicas_are_those_of_the_formula(
    pool: RankPool, tmp_path: Path, stage: type, micro_batches: int
) -> None:
    def measure(context: RankContext) -> list[tuple[int, int]]:
        trainer, events = steps_of(context, job_of(stage(replicas=2), 4, micro_batches))
        trainer.strategy.close()
        return [(sent(event), formula(trainer, micro_batches)) for event in events]

    for rank in pool.run(measure, tmp_path):
        assert all(measured == expected > 0 for measured, expected in rank), rank


def test_stages_move_1_1_and_one_and_a_half_times_the_ring(pool: RankPool, tmp_path: Path) -> None:
    def measure(context: RankContext) -> dict[str, int]:
        moved = {}
        for strategy in ["ring", *ALL]:
            trainer, events = steps_of(context, job_of(strategy, context.world_size, model=even))
            trainer.strategy.close()
            moved[strategy] = (
                sent(events[-1]) - events[-1]["traffic"].get("agreement", {"sent_bytes": 0})["sent_bytes"]
            )
        return moved

    for moved in pool.run(measure, tmp_path):
        ring = moved["ring"]
        assert moved["zero-1"] == pytest.approx(ring, abs=8 * ITEM)  # uneven chunks: an element a bucket
        assert moved["zero-2"] == pytest.approx(
            ring, abs=8 * ITEM
        )  # nothing to pad, but for uneven chunks there
        assert moved["zero-3"] == moved["zero-2"] * 3 // 2


@pytest.mark.parametrize("optimizer", ["lamb", "lars", "adamw"])
@pytest.mark.parametrize("strategy", ALL)
def test_norms_cost_two_collectives_a_step(
    pool: RankPool, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    def count(context: RankContext) -> list[int]:
        ours = job_of(strategy, context.world_size, optimizer=optimizer, clip_norm=0.5)
        trainer, events = steps_of(context, ours)
        trainer.strategy.close()
        return [event["traffic"].get("all_reduce", {"calls": 0})["calls"] for event in events]

    expected = 1 if optimizer == "adamw" else 2
    assert pool.run(count, tmp_path) == [[expected] * 2] * pool.world_size


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Of the memory behind them, each piece of memory once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("strategy", [ss.Zero1(bucket_mb=0.005), ss.Zero2(), ss.Zero3()], ids=ALL)
def test_a_rank_holds_its_shard_and_no_more(pool: RankPool, tmp_path: Path, strategy: Any) -> None:
    def held(context: RankContext) -> dict[str, Any]:
        trainer, _ = steps_of(context, job_of(strategy, context.world_size))
        ours = trainer.strategy
        moments = [s[key] for s in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        shapes = [tuple(p.shape) for p in trainer.model.parameters()]
        row = {
            "optimizer": storage_bytes(moments),
            "parameters": storage_bytes([local(p.detach()) for p in trainer.model.parameters()]),
            "gradients": storage_bytes([local(p.grad) for p in trainer.model.parameters()]),
            "shapes": shapes,
            "buckets": [sum(p.numel() for _, p in b.named) for b in getattr(ours, "buckets", [])],
        }
        ours.close()
        return row

    world = pool.world_size
    for rank, row in enumerate(pool.run(held, tmp_path)):
        whole = sum(torch.Size(shape).numel() for shape in row["shapes"]) * ITEM
        padded = sum(sharding.padded_elements(shape, world) for shape in row["shapes"]) // world * ITEM
        if strategy.name == "zero-1":
            shard = int(sharding.flat_shard_elements(row["buckets"], world)[rank]) * ITEM
            assert abs(shard - whole / world) <= len(row["buckets"]) * ITEM
            assert (row["parameters"], row["gradients"]) == (whole, whole)
        else:
            shard = int(sharding.row_shard_elements(row["shapes"], world)[rank]) * ITEM
            assert (row["parameters"], row["gradients"]) == (padded, padded)  # FSDP2 keeps its padding
            assert shard <= padded
        assert row["optimizer"] == 2 * shard


def test_shards_of_all_ranks_make_up_the_tensors(pool: RankPool, tmp_path: Path) -> None:
    shapes = [(17, 64), (3, 17), (1,), (10,)]
    total = sum(torch.Size(shape).numel() for shape in shapes)
    assert sharding.row_shard_elements(shapes, pool.world_size).sum() == total
    assert sharding.flat_shard_elements([total, 1], pool.world_size).sum() == total + 1
