"""Pipelines follow one process, in the order and with the messages that their formulas say."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import StrategyConformance, job, train
from shardscope.analytic import communication as comm
from shardscope.analytic import schedules
from shardscope.spec.layout import schedule_names
from shardscope.spec.models import GPTConfig, MLPConfig
from shardscope.training.context import RankContext
from shardscope.training.models import build_model
from shardscope.training.trainer import Trainer

SCHEDULES = schedule_names()
OTHERS = [name for name in SCHEDULES if name != "1f1b"]


def deep_gpt() -> nn.Module:
    """A GPT of eight layers to cut: embedding, six blocks and a head that shares the embedding's weight."""
    return build_model(GPTConfig(layers=6, hidden=16, heads=2, vocab=256, seq=16, ffn=32))


class TestPipeline(StrategyConformance):
    strategy = ss.Pipeline(split="even")
    model = staticmethod(deep_gpt)

    def batch(self, world_size: int, accumulation: int) -> ss.Batch:
        """48 samples in 4 micro-batches, as few as four stages take, or in 8."""
        return ss.Batch(48, micro_batch=12 if accumulation == 1 else 6)


def follow(pool: RankPool, folder: Path, strategy: Any, **changes: Any) -> None:
    """Hold one strategy against one process, with the clip on."""
    conformance = TestPipeline()
    conformance.strategy = strategy  # type: ignore[misc]
    micro_batch = changes.pop("micro_batch", 6)
    conformance.batch = lambda *_: ss.Batch(48, micro_batch=micro_batch)  # type: ignore[method-assign]
    fields = {"precision": "fp64", "clip_norm": 0.5, "optimizer": "adamw", **changes}
    conformance.follow(pool, folder, **fields)


@pytest.mark.parametrize("schedule", OTHERS)
def test_every_schedule_follows_one_process(pool: RankPool, tmp_path: Path, schedule: str) -> None:
    optimizer = ["adamw", "lamb"][(OTHERS.index(schedule) + pool.world_size) % 2]
    follow(pool, tmp_path, ss.Pipeline(schedule=schedule, split="even"), optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("zero-bubble", "selective"), ("zbv", "full"), ("dualpipev", "selective")]
)
def test_recomputation_works_with_a_split_backward(
    pool: RankPool, tmp_path: Path, schedule: str, recompute: str
) -> None:
    follow(pool, tmp_path, ss.Pipeline(schedule=schedule, split="even"), recompute=recompute)


def pipeline_job(strategy: Any, world_size: int, **changes: Any) -> ss.Job:
    """Two steps on eight micro-batches of two samples."""
    fields = {"model": deep_gpt, "batch": ss.Batch(16, micro_batch=2), "steps": 2, "precision": "fp32"}
    return job(strategy=strategy, world_size=world_size, **{**fields, **changes})


def trained(ours: ss.Job) -> Callable[[RankContext], Any]:
    """Takes all steps; the trainer stays at hand for what the test wants to see."""

    def run(context: RankContext) -> tuple[dict[str, Any], list[list[Any]], tuple[int, ...], list[int]]:
        trainer = Trainer(ours, context, context.events.path.parent)
        context.meter.drain()
        for step in range(1, ours.steps + 1):
            trainer.take_step(step)
        cut = trainer.strategy.cut  # type: ignore[attr-defined]
        trainer.strategy.close()
        events = [json.loads(line) for line in context.events.path.read_text().splitlines()]
        step_event = [event for event in events if event["event"] == "step"][-1]
        ops = [event["ops"] for event in events if event["event"] == "schedule"][-1]
        return step_event["traffic"], ops, cut.split, [output.nbytes for (output,) in cut.outputs[:-1]]

    return run


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_the_operations_of_its_table_in_order_and_sends_the_bytes_of_its_formula(
    pool: RankPool, tmp_path: Path, schedule: str
) -> None:
    ranks = pool.world_size
    strategy = ss.Pipeline(schedule=schedule, split="even")
    results = pool.run(trained(pipeline_job(strategy, ranks)), tmp_path)
    table = schedules.build(schedule, ranks, 8)
    for rank, (_, ops, _, _) in enumerate(results):
        assert [schedules.ScheduledOp(*op[:3]) for op in ops] == list(table.ranks[rank])
        assert all(start <= end for *_, start, end in ops)
    boundaries = results[0][3]
    assert boundaries == [2 * 16 * 16 * 4] * (len(table.stage_ranks) - 1)
    expected = comm.pipeline_bytes(boundaries, table.stage_ranks, 8)
    assert [traffic["send"]["sent_bytes"] for traffic, *_ in results] == expected.tolist()
    for rank, (traffic, *_) in enumerate(results):
        _check_peers(traffic["send"]["sent_to"], rank, table.stage_ranks)
    _check_tied(results, table.stage_ranks)


def _check_peers(sent_to: dict[str, int], rank: int, stage_ranks: tuple[int, ...]) -> None:
    there = set(pairwise(stage_ranks))
    pairs = there | {(after, before) for before, after in there}
    assert {int(peer) for peer in sent_to} == {to for at, to in pairs if at == rank != to}


def _check_tied(results: list[Any], stage_ranks: tuple[int, ...]) -> None:
    """Only the ranks of the first and the last stage exchange the gradient of the tokens' weight."""
    holders = sorted({stage_ranks[0], stage_ranks[-1]})
    if len(holders) == 1:
        assert all("ring_all_reduce" not in traffic for traffic, *_ in results)
        return
    expected = comm.tied_bytes(256 * 16, 4, holders, len(results))
    measured = [traffic.get("ring_all_reduce", {"sent_bytes": 0})["sent_bytes"] for traffic, *_ in results]
    assert measured == expected.tolist()


def deep_mlp() -> nn.Module:
    """Eight small layers on digits."""
    return build_model(MLPConfig(layers=7, hidden=16))


@pytest.mark.ranks(3)
@pytest.mark.weekly
def test_a_hundred_starts_of_changing_schedule_do_not_hang(pool: RankPool, tmp_path: Path) -> None:
    def start_again_and_again(context: RankContext) -> int:
        for i in range(100):
            strategy = ss.Pipeline(schedule=SCHEDULES[i % len(SCHEDULES)], split="even")
            ours = pipeline_job(strategy, context.world_size, model=deep_mlp, data="digits", steps=1)
            train(ours, context)
        return 100

    assert pool.run(start_again_and_again, tmp_path) == [100] * pool.world_size
