"""ZeRO-2 and ZeRO-3 through shared buffers: the bits and the recorded traffic of the ring over TCP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import job
from shardscope.spec.shard_buffers import Limits
from shardscope.training.collectives.paced_group import PacedGroups
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer
from shardscope.training.transports.shm import shards

STAGES = ["zero-2", "zero-3"]
STEPS = 4


def trained(
    context: RankContext, ours: ss.Job, *, logged_step: int = 0
) -> tuple[list[float], list[dict[str, Any]], list[torch.Tensor]]:
    """Losses, traffic of each step, and parameters."""
    trainer = Trainer(ours, context, context.events.path.parent)
    context.meter.logged_step, rows = logged_step, []
    record = trainer._record

    def watched(step: int, *arguments: Any) -> None:
        with context.meter._lock:
            rows.append({name: vars(row) for name, row in context.meter._traffic_by_step[step].items()})
        record(step, *arguments)

    trainer._record = watched
    losses = [float(trainer.take_step(step)) for step in range(1, ours.steps + 1)]
    context.meter.logged_step = 0
    parameters = [p.detach().clone() for p in trainer.strategy.full_parameters().values()]
    trainer.strategy.close()
    return losses, rows, parameters


def with_small_buffers(context: RankContext, ours: ss.Job, most: int) -> Any:
    """As `trained`, with buffers of at most `most` bytes."""
    with pytest.MonkeyPatch.context() as patch:
        limits = Limits(gathered=most, reduced=2 * context.world_size * most, together=most)
        patch.setattr(shards.ShardBuffers, "limits", limits)
        return trained(context, ours)


def both(
    pool: RankPool, tcp_pool: RankPool, folder: Path, ours: ss.Job, train: Callable[..., Any] = trained
) -> list[tuple[Any, Any]]:
    shared = pool.run(lambda context: train(context, ours), folder)
    return list(zip(shared, tcp_pool.run(lambda context: trained(context, ours), folder), strict=True))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_every_bit_and_every_count_is_that_of_the_ring_over_tcp(
    pool: RankPool, tcp_pool: RankPool, tmp_path: Path, stage: str, accumulation: int
) -> None:
    batch = ss.Batch(48, micro_batch=48 // pool.world_size // accumulation)
    ours = job(
        model="mlp", data="digits", strategy=stage, world_size=pool.world_size, steps=STEPS, batch=batch,
        precision="fp32", clip_norm=1.0,
    )  # fmt: skip
    for (losses, rows, parameters), (losses_tcp, rows_tcp, parameters_tcp) in both(
        pool, tcp_pool, tmp_path, ours
    ):
        assert losses == losses_tcp
        assert rows == rows_tcp
        assert all(map(torch.equal, parameters, parameters_tcp))


@pytest.mark.parametrize("stage", STAGES)
def test_units_larger_than_the_buffers_go_in_pieces(
    pool: RankPool, tcp_pool: RankPool, tmp_path: Path, stage: str
) -> None:
    ours = job(
        model="mlp", data="digits", strategy=stage, world_size=pool.world_size, steps=STEPS, precision="fp32"
    )
    train = partial(with_small_buffers, most=16_384)
    for shared, tcp in both(pool, tcp_pool, tmp_path, ours, train):
        assert shared[:2] == tcp[:2]
        assert all(map(torch.equal, shared[2], tcp[2]))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_whose_messages_are_logged_uses_the_ring(
    pool: RankPool, tcp_pool: RankPool, tmp_path: Path, stage: str
) -> None:
    ours = job(
        model="mlp", data="digits", strategy=stage, world_size=pool.world_size, steps=STEPS, precision="fp32"
    )

    def logged(context: RankContext) -> tuple[Any, set[tuple[str, str]]]:
        context.meter.drain_messages()
        messages: list[list[Any]] = []
        drain = context.meter.drain_messages
        context.meter.drain_messages = lambda: messages.extend(drain()) or []
        try:
            result = trained(context, ours, logged_step=2)
        finally:
            del context.meter.drain_messages
        return result, {(row[0], row[1]) for row in messages}

    shared = pool.run(logged, tmp_path)
    tcp = tcp_pool.run(lambda context: trained(context, ours), tmp_path)
    for ((losses, rows, parameters), kinds), expected in zip(shared, tcp, strict=True):
        assert {("ring_all_gather", "sent"), ("ring_reduce_scatter", "arrived")} <= kinds
        assert (losses, rows) == expected[:2]
        assert all(map(torch.equal, parameters, expected[2]))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_the_run_says_what_carries_the_shards(pool: RankPool, tmp_path: Path, stage: str) -> None:
    def reason(context: RankContext, **changes: Any) -> str:
        ours = job(
            model="mlp", data="digits", world_size=context.world_size,
            **{"strategy": stage, "precision": "fp32", **changes},
        )  # fmt: skip
        trainer = Trainer(ours, context, tmp_path)
        said = trainer.strategy.described_transport()["transport_reason"]
        trainer.strategy.close()
        return said

    for plain in pool.run(reason, tmp_path):
        assert "shared buffers" in plain
    for by_message in pool.run(lambda context: reason(context, compression="int8"), tmp_path):
        assert by_message.endswith("; shards go around a ring because gradients are compressed")

    def delayed(context: RankContext) -> str:
        store = dist.PrefixStore(f"delayed {stage}", context.group.get_group_store())
        group = PacedGroups(ss.Link(bandwidth="1 Gbit/s", latency="1 ms")).make(
            context.group.route, context.meter, "gloo", store
        )
        said = reason(replace(context, group=group))
        group.pacer.close()
        return said

    for by_message in pool.run(delayed, tmp_path):
        assert by_message.endswith("; shards go around a ring because the job's messages are delayed")
