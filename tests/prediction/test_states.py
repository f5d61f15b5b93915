"""What strategies say that ranks hold, against real ranks, where `test_traffic` does not go: to the byte, each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.alone import trainer_in
from conformance.ranks import RankPool
from prediction.ranks_of import EVERY_STEP, hold_states, hold_traffic, run_on
from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory import RankStates
from shardscope.prediction.traced import traced
from shardscope.spec.models import model_config
from shardscope.spec.registry import names

STRATEGIES = [
    "all-reduce", "gossip", "zero-1", ss.Zero1(collectives="backend", bucket_mb=0.01), "zero-2", "zero-3",
    pytest.param(ss.Zero3(replicas=2), marks=pytest.mark.ranks(4)), ss.Zero2(offload=True),
    ss.ParameterServer(servers=2),
]  # fmt: skip
APART = {"servers": 2, "budget": "per-worker"}  # every worker takes every step, so that each can be measured
SERVERS = [
    pytest.param(ss.ParameterServer(mode="async", dedicated=True, **APART), marks=pytest.mark.ranks(3, 4)),
    ss.ParameterServer(mode="ssp", staleness=2, **APART),
]


class PartlyFrozen(nn.Module):
    """Layers of odd sizes, of which one is frozen and one in part; a scale, a norm with buffers, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 33).requires_grad_(False)
        self.norm = nn.BatchNorm1d(33)
        self.second, self.third = nn.Linear(33, 33), nn.Linear(33, 33)
        self.third.weight = self.second.weight
        self.head = nn.Linear(33, 10)
        self.head.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.flatten(1)))
        x = self.third(self.second(x).relu()).relu()
        return self.scale * self.head(x)


class InLayers(nn.Sequential):
    """Layers for a pipeline: some frozen, some with buffers, some with neither, and one that is used twice."""

    def __init__(self) -> None:
        twice = nn.Linear(33, 33)
        super().__init__(
            nn.Flatten(), nn.Linear(64, 33).requires_grad_(False), nn.BatchNorm1d(33), twice, nn.ReLU(), twice,
            nn.BatchNorm1d(33), nn.Linear(33, 10),
        )  # fmt: skip


class WithoutParameters(nn.Sequential):
    """The first stage of two has none to train, and the first of three or four has none at all."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Tanh(), nn.ReLU(), nn.Linear(64, 10))


class PartlyUsed(nn.Module):
    """Its loss depends on two layers out of three."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.head = nn.Linear(64, 33), nn.Linear(5, 7), nn.Linear(33, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x.flatten(1)).relu())


class PartlyUsedInLayers(nn.Sequential):
    """Layers for a pipeline, of which one has another that it does not use."""

    def __init__(self) -> None:
        second = nn.Linear(33, 33)
        second.add_module("unused", nn.Linear(5, 7))
        super().__init__(nn.Flatten(), nn.Linear(64, 33), second, nn.ReLU(), nn.Linear(33, 10))


def hold(pool: RankPool, folder: Path, **fields: Any) -> None:
    fields = {"model": "mlp", "data": "digits", "batch": 48, "steps": 4, "record": EVERY_STEP, **fields}
    job = ss.Job(world_size=pool.world_size, **fields)
    trace = traced(job).table.step
    assert trace is not None
    events = run_on(pool, job, folder)
    assert hold_states(job, trace, events) >= 3 * job.steps * job.world_size
    hold_traffic(job, trace, events)


@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, ss.Pipeline(split="even")], ids=str)
def test_every_precision_is_held_in_its_own_width(
    pool: RankPool, tmp_path: Path, strategy: Any, precision: str
) -> None:
    hold(pool, tmp_path, strategy=strategy, precision=precision, optimizer="adamw")


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", pytest.param("int8", marks=pytest.mark.weekly)])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "ring"], ids=str)
def test_gradients_of_several_micro_batches_are_held_where_they_add_up(
    pool: RankPool, tmp_path: Path, strategy: Any, compression: str
) -> None:
    if compression != "none" and getattr(strategy, "collectives", "ring") == "backend":
        pytest.skip("they do not go together")
    batch = ss.Batch(48, micro_batch=48 // pool.world_size // 4)
    hold(pool, tmp_path, strategy=strategy, compression=compression, batch=batch, optimizer="nesterov")


@pytest.mark.parametrize(
    "strategy", [*STRATEGIES, *SERVERS], ids=lambda s: f"{s} {getattr(s, 'changed', '')}"
)
def test_frozen_parameters_and_buffers_are_held_without_gradients(
    pool: RankPool, tmp_path: Path, strategy: Any
) -> None:
    hold(pool, tmp_path, model=PartlyFrozen, strategy=strategy, optimizer="lamb")


@pytest.mark.parametrize("strategy", ["gossip", "zero-2", "zero-3", ss.Pipeline(split="even")], ids=str)
def test_parameters_that_no_loss_depends_on_have_neither_gradients_nor_state(
    pool: RankPool, tmp_path: Path, strategy: Any
) -> None:
    model = PartlyUsedInLayers if isinstance(strategy, ss.Pipeline) else PartlyUsed
    hold(pool, tmp_path, model=model, strategy=strategy, optimizer="adamw")


@pytest.mark.parametrize("schedule", names(ss.PipelineSchedule))
def test_every_schedule_holds_its_own_stages(pool: RankPool, tmp_path: Path, schedule: str) -> None:
    """The resnet has buffers, and GPT's tokens are in the first stage and in the last."""
    strategy, fits = ss.Pipeline(schedule=schedule, split="even"), 0
    stages = pool.world_size * strategy.stages_per_rank
    for model, data in (("resnet", "digits"), ("gpt-nano", "python-source")):
        if model_config(model).num_layers_in_order >= stages:
            folder = tmp_path / model
            folder.mkdir()
            hold(pool, folder, model=model, data=data, strategy=strategy, optimizer="adamw", steps=2)
            fits += 1
    if not fits:
        pytest.skip(f"neither has {stages} layers")


@pytest.mark.parametrize("model", [InLayers, WithoutParameters])
def test_stages_hold_what_their_layers_use(pool: RankPool, tmp_path: Path, model: type[nn.Module]) -> None:
    hold(pool, tmp_path, model=model, strategy=ss.Pipeline(split="even"), optimizer="adamw")


def test_lars_without_momentum_keeps_nothing(pool: RankPool, tmp_path: Path) -> None:
    hold(pool, tmp_path, strategy="zero-1", optimizer=ss.Optimizer("lars", momentum=0.0))


def said(strategy: Any, world_size: int = 2, number: int = 3, **fields: Any) -> RankStates:
    job = ss.Job(model="mlp", data="digits", strategy=strategy, world_size=world_size, batch=48, **fields)
    trace = traced(job).table.step
    assert trace is not None
    found = job.strategy.states(JobStep(job, trace, number))
    assert isinstance(found, RankStates)
    return found


@pytest.mark.parametrize("micro_batch", [None, 8])
def test_one_process_holds_what_is_said(tmp_path: Path, micro_batch: int | None) -> None:
    batch, job_of = ss.Batch(48, micro_batch=micro_batch), {"model": "resnet", "data": "digits"}
    trainer = trainer_in(tmp_path, **job_of, batch=batch, record=EVERY_STEP, steps=3, optimizer="lamb")
    for step in (1, 2, 3):
        trainer.take_step(step)
    assert trainer.loader is not None
    trainer.loader.close()
    trace = traced(trainer.job).table.step
    assert trace is not None
    rows = [json.loads(line) for line in trainer.context.events.path.read_text().splitlines()]
    assert hold_states(trainer.job, trace, [rows]) == 12


def test_one_process_holds_the_whole() -> None:
    states = said("single", 1, optimizer="adamw")
    assert states.parameters.tolist() == states.gradients.tolist()
    assert states.optimizer.tolist() == [2 * states.parameters[0] + 4 * 14]


def test_shards_add_up_to_the_whole() -> None:
    whole = said("single", 1)
    for strategy in ("zero-1", "zero-2", ss.ParameterServer(servers=2)):
        kept = said(strategy, 4)
        counters = 4 * 14 * (len(kept.optimizer) if not isinstance(strategy, ss.ParameterServer) else 1)
        assert kept.optimizer.sum() - counters == whole.optimizer.sum() - 4 * 14
    stages = said(ss.Pipeline(split="even"), 4)
    for kind in ("parameters", "gradients", "optimizer"):
        assert getattr(stages, kind).sum() == getattr(whole, kind).sum()


def test_a_cut_by_measured_times_is_an_estimate() -> None:
    assert not said(ss.Pipeline(split="time")).is_exact
    assert said(ss.Pipeline(split="memory")).is_exact


def test_a_strategy_that_does_not_say_holds_what_nobody_knows() -> None:
    assert ss.Strategy.states(ss.Strategy("ring"), None) is None
