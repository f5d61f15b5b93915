"""Batches that are divided unevenly: whatever the shares, losses and parameters are those of one process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardscope as ss
from conformance.alone import trainer_in
from conformance.emulated import needs_namespaces
from conformance.ranks import RankPool
from conformance.runs import small_job
from conformance.strategy import STEPS, job, oracle, relative_difference, tiny_gpt
from shardscope.training.context import RankContext
from shardscope.training.data import GlobalSampler, Loader
from shardscope.training.trainer import Trainer

STRATEGIES = (
    ss.Ring(bucket_mb=0.02), ss.AllReduce(), ss.Tree(), ss.Hierarchical(per_node=2), ss.Zero1(), ss.Zero2(), ss.Zero3(),
    ss.ParameterServer(servers=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


Trained = tuple[list[float], list[int], dict[str, Tensor]]


def train(job: ss.Job) -> Callable[[RankContext], Trained]:
    """Losses weighted by samples, the samples of each step, and the parameters at the end."""

    def body(context: RankContext) -> Trained:
        trainer = Trainer(job, context, context.events.path.parent)
        losses, samples = [], []
        for step in range(1, job.steps + 1):
            samples.append(trainer.work.own)
            losses.append(trainer.take_step(step) * samples[-1])
        trainer.strategy.synchronize(job.steps)
        parameters = {
            name: p.detach().double().clone() for name, p in trainer.strategy.full_parameters().items()
        }
        trainer.strategy.close()
        return losses, samples, parameters

    return body


def check(results: list[Trained], optimizer: str = "adamw", precision: str = "fp32") -> None:
    """Against one process, in fp64 to 1e-9 and in fp32 to 1e-5."""
    bound = 1e-9 if precision == "fp64" else 1e-5
    expected_losses, expected = oracle(tiny_gpt, optimizer, precision, None)
    steps = zip(*(losses for losses, _, _ in results), strict=True)
    assert [sum(row) / 48 for row in steps] == pytest.approx(expected_losses, rel=bound)
    for _, _, parameters in results:
        assert relative_difference(parameters, expected) < bound


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.label)
def test_uneven_shares_follow_one_process(four: RankPool, tmp_path: Path, strategy: ss.Strategy) -> None:
    micro_batch = None if strategy.exchanges_in_passes else 4
    batch = ss.Batch(48, micro_batch=micro_batch, shares=(2, 2, 1, 1))
    optimizer = ss.Optimizer("adamw", lr=1e-3)
    ours = job(strategy=strategy, world_size=4, batch=batch, optimizer=optimizer)
    results = four.run(train(ours), tmp_path)
    assert [samples[0] for _, samples, _ in results] == [16, 16, 8, 8]
    check(results, precision="fp64")


def slow_on_two_ranks() -> nn.Module:
    """A model whose forward pass takes 4 ms for a sample on ranks 0 and 1, and twice as long on the others."""
    model = tiny_gpt()

    def wait(_: nn.Module, inputs: Any) -> None:
        if model.training:
            time.sleep(4e-3 * len(inputs[0]) * (1 if dist.get_rank() < 2 else 2))

    model.register_forward_pre_hook(wait)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ss.Ring(), ss.Zero3()], ids=lambda strategy: strategy.label)
def test_measured_shares_give_fast_ranks_more_and_follow_one_process(
    four: RankPool, tmp_path: Path, strategy: ss.Strategy
) -> None:
    ours = job(
        strategy=strategy, world_size=4, batch=ss.Batch(48, shares="measured"), precision="fp32",
        model=slow_on_two_ranks, optimizer=ss.Optimizer("adamw", lr=1e-3),
    )  # fmt: skip
    results = four.run(train(ours), tmp_path)
    samples = [samples for _, samples, _ in results]
    assert [each[:5] for each in samples] == [[12] * 5] * 4
    assert all(len(set(each[5:])) == 1 for each in samples)
    assert sum(each[-1] for each in samples) == 48
    if strategy == ss.Ring():  # ranks of ZeRO-3 also need cores to gather, which other programs may use
        assert sum(each[-1] for each in samples[:2]) > 24
    check(results)


def test_measured_shares_keep_whole_micro_batches_and_are_measured_again(
    four: RankPool, tmp_path: Path
) -> None:
    batch = ss.Batch(48, micro_batch=4, shares="measured", rebalance_every=6)
    ours = job(
        strategy="ring", world_size=4, batch=batch, precision="fp32", model=slow_on_two_ranks,
        optimizer=ss.Optimizer("adamw", lr=1e-3),
    )  # fmt: skip
    results = four.run(train(ours), tmp_path)
    assert {count % 4 for _, samples, _ in results for count in samples} == {0}
    assert [samples[-1] for _, samples, _ in results] == [16, 16, 8, 8]
    check(results)


def test_every_sample_is_used_once_however_a_batch_is_divided() -> None:
    class Rows:
        def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            return indices, indices

    divisions = [(6, 3, 3), (2, 8, 2), (1, 1, 10)]
    sampler = GlobalSampler(120, 12, seed=3)
    loaders = [
        Loader(Rows(), GlobalSampler(120, 12, seed=3), rank=r, world_size=3, prefetch=True) for r in range(3)
    ]
    seen = []
    for step in range(10):
        for loader in loaders:
            loader.divide(divisions[step % 3])
        rows = [loader.batch(step)[0] for loader in loaders]
        assert [len(each) for each in rows] == list(divisions[step % 3])
        assert torch.equal(torch.cat(rows), sampler.indices(step))
        seen += torch.cat(rows).tolist()
    assert sorted(seen) == list(range(120))
    for loader in loaders:
        loader.close()


def test_dropped_gradients_are_left_out_of_the_mean(four: RankPool, tmp_path: Path) -> None:
    """Backup workers against one process that takes each update's samples as the server's log names them."""
    ours = job(
        strategy=ss.ParameterServer(backups=1), world_size=4, batch=48, model=slow_on_last_rank,
        optimizer=ss.Optimizer("adamw", lr=1e-3), clip_norm=0.5,
    )  # fmt: skip
    results = four.run(backed_up(ours), tmp_path)
    updates = results[0][1]
    assert len(updates) == STEPS
    assert all(len(workers) == 3 for workers in updates)
    assert sum(3 in workers for workers in updates) < STEPS / 2
    dropped = [event["dropped"] for _, _, events in results for event in events if event.get("dropped")]
    assert len(dropped) == STEPS
    alone = trainer_in(
        tmp_path / "alone", model=tiny_gpt, data="python-source", precision="fp64", steps=STEPS, batch=48,
        optimizer=ss.Optimizer("adamw", lr=1e-3), clip_norm=0.5,
    )  # fmt: skip
    for step, workers in enumerate(updates):
        rows = alone.sampler.indices(step).split(12)
        batch = alone._place(alone.data.train.batch(torch.cat([rows[worker] for worker in workers])))
        alone.strategy.step([batch], alone.loss_function, alone.optimizer)
    expected = {name: p.detach().double() for name, p in alone.strategy.full_parameters().items()}
    for parameters, *_ in results:
        assert relative_difference(parameters, expected) < 1e-9


def slow_on_last_rank() -> nn.Module:
    model = tiny_gpt()

    def wait(*_: Any) -> None:
        if model.training:
            time.sleep(0.1 if dist.get_rank() == 3 else 0.02)

    model.register_forward_pre_hook(wait)
    return model


def backed_up(job: ss.Job) -> Callable[[RankContext], Any]:
    """Parameters, the workers of each update on the server, and the rank's step events."""

    def body(context: RankContext) -> Any:
        import json

        trainer = Trainer(job, context, context.events.path.parent)
        for step in range(1, job.steps + 1):
            trainer.take_step(step)
        trainer.strategy.synchronize(job.steps, ending=True)
        parameters = {
            name: p.detach().double().clone() for name, p in trainer.strategy.full_parameters().items()
        }
        trainer.strategy.close()
        events = [json.loads(line) for line in context.events.path.read_text().splitlines()]
        updates = [event["workers"] for event in events if event["event"] == "update"]
        return parameters, updates, [event for event in events if event["event"] == "step"]

    return body


@pytest.mark.slow
def test_a_straggler_is_named_until_the_work_is_shared_by_speed() -> None:
    """On emulated nodes, two of which are half as fast: the run names one, and shares by speed leave none."""
    needs_namespaces()
    cluster = ss.Cluster.emulated(nodes=3, slowdown={2: 2.0}, flops="40 MFLOP/s")
    run = ss.launch(small_job(world_size=3, batch=60, steps=14), cluster).wait(120)
    even, jitter = run.summary(), ss.jitter(run)
    assert (jitter.num_ranks, jitter.num_steps) == (3, 12)
    assert jitter.between > jitter.within
    assert jitter.slowdown(4096) > jitter.slowdown(8) > 1
    assert str(even.straggler).startswith("rank 2 is 2 times slower in")
    assert even.shares is None
    shared = ss.launch(
        small_job(world_size=3, batch=ss.Batch(60, shares="measured"), steps=20), cluster
    ).wait(120)
    assert shared.summary().shares == "24, 24, 12"
    late = shared.metrics().query("step > 8").step_time_s.median()
    assert late < 0.75 * even.step_time_s


@pytest.mark.slow
def test_stages_by_speed_leave_no_stage_that_others_wait_for() -> None:
    """Twelve equal layers on two nodes, the second at half speed: six and six, or eight and four."""
    needs_namespaces()
    cluster = ss.Cluster.emulated(nodes=2, slowdown={1: 2.0}, flops="30 MFLOP/s")

    def run(split: str) -> ss.Run:
        changes = {"strategy": ss.Pipeline(split=split), "batch": ss.Batch(32, micro_batch=8), "steps": 14}
        return ss.launch(small_job(model=twelve_layers, **changes), cluster).wait(120)

    even, by_speed = run("even"), run("speed")
    named = r"stage 1 \(rank 1\) is the bottleneck: it is 2(\.\d)? times slower in"
    assert re.match(named, str(even.summary().straggler))
    assert by_speed.summary().straggler is None
    gain = even.summary().step_time_s / by_speed.summary().step_time_s
    expected = [ss.predict(each.job, cluster).step_time_s for each in (even, by_speed)]
    assert gain == pytest.approx(expected[0] / expected[1], rel=0.1)
    assert gain > 1.3


def twelve_layers() -> nn.Module:
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 96))
    return nn.Sequential(first, *(nn.Linear(96, 96) for _ in range(11)))
