"""ZeRO 1 to 3 follow one process, with and without replicas, offloading and the backend's own collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.alone import Never, parameters_of
from conformance.ranks import RankPool
from conformance.strategy import StrategyConformance, job, train
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer


class TestZero1(StrategyConformance):
    strategy = ss.Zero1(bucket_mb=0.02)  # several buckets even for a tiny model


class TestZero2(StrategyConformance):
    strategy = ss.Zero2()


class TestZero3(StrategyConformance):
    strategy = ss.Zero3()


ALL = ["zero-1", "zero-2", "zero-3"]


def follow(pool: RankPool, folder: Path, strategy: object, **changes: object) -> None:
    conformance = StrategyConformance()
    conformance.strategy = strategy  # type: ignore[misc]
    conformance.follow(pool, folder, **{"optimizer": "lamb", "precision": "fp64", **changes})


@pytest.mark.parametrize("strategy", ALL)
def test_the_backends_own_collectives_give_the_same(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    spec = ss.Job(model="mlp", data="digits", strategy=f"{strategy}:backend", batch=48).strategy
    follow(pool, tmp_path, spec, accumulation=4, clip_norm=0.5)


@pytest.mark.ranks(4)  # two replicas of two shards are four ranks
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("collectives", ["ring", "backend"])
@pytest.mark.parametrize("stage", [ss.Zero2, ss.Zero3])
def test_two_replicas_of_two_shards_follow_one_process(
    pool: RankPool, tmp_path: Path, stage: type, collectives: str, optimizer: str
) -> None:
    strategy = stage(replicas=2, collectives=collectives)
    follow(pool, tmp_path, strategy, optimizer=optimizer, accumulation=4, clip_norm=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [ss.Zero2, ss.Zero3])
def test_offloading_follows_one_process(pool: RankPool, tmp_path: Path, stage: type) -> None:
    follow(pool, tmp_path, stage(offload=True), optimizer="adamw", accumulation=4)


class Tied(nn.Module):
    """Two blocks that share one matrix, a row vector shorter than any group of ranks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.head = nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += images.sum()
        x = images.flatten(1)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x) * self.scale


def tied_job(**changes: object) -> ss.Job:
    return job(
        **{"model": Tied, "data": "digits", "optimizer": ss.Optimizer("lamb", max_grad_norm=0.1), **changes}
    )


@pytest.mark.parametrize("strategy", ALL)
def test_shared_tensors_stay_shared_and_shards_may_be_empty(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    def both(context: RankContext) -> tuple[float, list[float]]:
        ours = train(tied_job(strategy=strategy, world_size=context.world_size), context)[1]
        ring = train(tied_job(strategy="ring", world_size=context.world_size), context)[1]
        return max(float((ours[n] - ring[n]).norm() / ring[n].norm()) for n in ring), sorted(ours) == sorted(
            ring
        )

    for difference, same_names in pool.run(both, tmp_path):
        assert same_names
        assert difference < 1e-9


@pytest.mark.parametrize("strategy", ALL)
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    def overflow(context: RankContext) -> tuple[list[bool], bool]:
        last = context.rank == context.world_size - 1
        ours = tied_job(
            strategy=strategy,
            world_size=context.world_size,
            precision="fp16-mixed",
            optimizer="adamw",
            steps=4,
        )
        trainer = Trainer(ours, context, tmp_path)
        before = {name: p.clone() for name, p in trainer.strategy.full_parameters().items()}
        finish, skipped = trainer.strategy.finish_exchange, []
        update = trainer.strategy.precision.update

        def watched(*args: object, **options: object) -> tuple[float | None, bool]:
            result = update(*args, **options)
            skipped.append(result[1])
            return result

        def one_infinite() -> None:
            finish()
            grads = [p.grad for p in trainer.strategy.parameters if p.grad is not None and p.grad.numel()]
            if last and trainer.context.meter.step == 1:
                grads[0].view(-1)[0] = float("inf")

        trainer.strategy.precision.update = watched
        trainer.strategy.finish_exchange = one_infinite
        trainer.take_step(1)
        after = trainer.strategy.full_parameters()
        unmoved = all(torch.equal(before[name], after[name]) for name in before)
        trainer.take_step(2)
        moved = trainer.strategy.full_parameters()
        trainer.strategy.close()
        return skipped, unmoved and not all(torch.equal(before[name], moved[name]) for name in before)

    assert pool.run(overflow, tmp_path) == [([True, False], True)] * pool.world_size


@pytest.mark.parametrize("strategy", ["zero-1", "ring"])
def test_a_parameter_that_takes_no_part_is_named(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    def refusal(context: RankContext) -> str:
        class HeadOnly(Tied):
            def forward(self, images: torch.Tensor) -> torch.Tensor:
                return self.head(images.flatten(1))

        trainer = Trainer(
            tied_job(model=HeadOnly, strategy=strategy, world_size=context.world_size), context, tmp_path
        )
        with pytest.raises(ss.SpecError) as refused:
            trainer.take_step(1)
        trainer.strategy.close()
        return str(refused.value)

    for message in pool.run(refusal, tmp_path):
        assert "the loss" in message
        assert "requires_grad_(False)" in message


def repeated() -> nn.Module:
    block = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    return nn.Sequential(nn.Flatten(), block, nn.Linear(64, 64), block, nn.Linear(64, 10))


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3"])
def test_a_block_that_runs_twice_follows_one_process(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    def both(context: RankContext) -> float:
        ours = tied_job(model=repeated, strategy=strategy, world_size=context.world_size, steps=4)
        mine = train(ours, context)[1]
        ring = train(ours.replace(strategy="ring"), context)[1]
        return max(float((mine[n] - ring[n]).norm() / ring[n].norm()) for n in ring)

    assert max(pool.run(both, tmp_path)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_parameter_that_takes_no_part_hinders_no_checkpoint(
    pool: RankPool, tmp_path: Path, first: bool
) -> None:
    class HalfUsed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if first:
                self.unused = nn.Linear(4, 4)
            self.head = nn.Linear(64, 10)
            if not first:
                self.unused = nn.Linear(4, 4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(images.flatten(1))

    ours = tied_job(model=HalfUsed, strategy="zero-3", optimizer="adamw", batch=48, steps=3)

    def both(context: RankContext) -> tuple[set[str], bool]:
        job = ours.replace(world_size=context.world_size, checkpoint=2)
        whole = Trainer(job, context, tmp_path / "whole")
        whole.train(Never())
        rest = Trainer(job, context, tmp_path / "rest")
        rest.resume(tmp_path / "whole/checkpoints/step-2")
        saved = {
            key for key in whole.strategy.checkpoint_state(whole.optimizer)["optimizer"] if "unused" in key
        }
        rest.train(Never())
        return saved, all(map(torch.equal, parameters_of(whole), parameters_of(rest)))

    for folder in ("whole", "rest"):
        (tmp_path / folder).mkdir()
    assert pool.run(both, tmp_path) == [(set(), True)] * pool.world_size


class Transposed(nn.Module):
    """Its weight lies in memory column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 64).t())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ self.weight


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3"])
def test_a_parameter_that_is_not_contiguous_is_sharded(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    def difference(context: RankContext) -> float:
        ours = tied_job(model=Transposed, strategy=strategy, world_size=context.world_size, steps=2)
        mine, ring = (train(job, context)[1]["weight"] for job in (ours, ours.replace(strategy="ring")))
        return float((mine - ring).norm() / ring.norm())

    assert max(pool.run(difference, tmp_path)) < 1e-9
