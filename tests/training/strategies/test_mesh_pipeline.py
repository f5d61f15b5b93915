"""A pipeline with replicas and with divided layers: each stage follows one process, whatever the axes beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardscope as ss
from conformance.alone import context_for, losses_alone
from conformance.changing import refusals
from conformance.one_process import follow, hold_evaluation, hold_losses
from conformance.ranks import RankPool
from conformance.strategy import OPTIMIZERS, StrategyConformance, job, mean_losses, tiny_gpt, train
from shardscope.errors import SpecError
from shardscope.spec.models import GPTConfig
from shardscope.training.context import RankContext
from shardscope.training.models import build_model
from shardscope.training.trainer import Trainer

ZERO_1 = ss.Zero1(bucket_mb=0.02)
SCHEDULES = (
    "1f1b", "dualpipev", "gpipe", "interleaved", "v-half", "v-min", "zb-h1", "zb-h2", "zbv", "zero-bubble"
)  # fmt: skip


def mesh(data: Any = "ring", schedule: str = "1f1b", *, tensor: int = 1, **stages: Any) -> ss.Strategy:
    settings = ss.Pipeline(schedule=schedule, **stages)
    return ss.Strategy("mesh", data=data, tensor=tensor, pipeline=2, stages=settings)


def deeper_gpt() -> nn.Module:
    """Five layers, enough for two stages on each of two ranks."""
    return build_model(GPTConfig(layers=3, hidden=16, heads=2, vocab=256, seq=16, ffn=32))


class OfStages(StrategyConformance):
    def batch(self, world_size: int, accumulation: int) -> ss.Batch:
        """At least two micro-batches for each replica, as schedules need."""
        return ss.Batch(48, micro_batch=12 if accumulation == 1 else 6)


@pytest.mark.ranks(4)
class TestPipelineOfRings(OfStages):
    strategy = mesh(ss.Ring(bucket_mb=0.02))


@pytest.mark.slow
@pytest.mark.ranks(4)
class TestPipelineOfTensors(OfStages):
    strategy = mesh(tensor=2)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestPipelineOfTrees(OfStages):
    strategy = mesh(ss.Tree(bucket_mb=0.02), "gpipe")


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestPipelineOfAllReduces(OfStages):
    strategy = mesh(ss.AllReduce(bucket_mb=0.02), "zb-h1")


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestPipelineOfNodes(OfStages):
    strategy = mesh(ss.Hierarchical(per_node=2, bucket_mb=0.02))


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestPipelineOfZero1(OfStages):
    strategy = mesh(ZERO_1)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestPipelineOfZero2(OfStages):
    strategy = mesh(ss.Zero2())


@pytest.mark.weekly  # the slow tier has it in the random layouts of tests/oracle/test_hybrid.py
@pytest.mark.ranks(4)
class TestPipelineOfZero3(OfStages):
    strategy = mesh(ss.Zero3(), "zb-h1")


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", ["ring", ZERO_1, ss.Zero2(), ss.Zero3(), ss.Strategy("zero-3:backend")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_on_replicas(pool: RankPool, tmp_path: Path, schedule: str, data: Any) -> None:
    follow(pool, tmp_path, mesh(data, schedule), deeper_gpt, recompute="full")


def _ends_without_parameters() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10), nn.Identity())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", ["ring", pytest.param("all-reduce", marks=pytest.mark.weekly)])
def test_a_stage_without_parameters_exchanges_nothing(pool: RankPool, tmp_path: Path, data: str) -> None:
    fields: dict[str, Any] = {
        "model": _ends_without_parameters, "data": "digits", "steps": 3, "clip_norm": 0.5,
    }  # fmt: skip
    ours = job(strategy=mesh(data, split=(4, 1)), world_size=4, batch=ss.Batch(48, micro_batch=6), **fields)
    hold_losses(pool, tmp_path, ours)
    assert ss.predict(ours).by_rank is not None


def _untied() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 10)
    )


@pytest.mark.ranks(4)
def test_gradients_of_stages_are_compressed_as_those_of_whole_models(pool: RankPool, tmp_path: Path) -> None:
    """A cast compresses each element by itself, so that it does not matter which rank has it."""
    divided = ss.Strategy("mesh", tensor=2, tensor_plan={"1": "columns", "3": "rows"})
    fields: dict[str, Any] = {
        "model": _untied, "data": "digits", "steps": 6, "precision": "fp64", "batch": ss.Batch(48, micro_batch=6),
    }  # fmt: skip
    jobs = [
        job(strategy=strategy, world_size=4, compression=method, **fields)
        for strategy, method in ((mesh(split=(3, 3)), "bf16"), (divided, "bf16"), (divided, "none"))
    ]
    staged, tensors, plain = (mean_losses(pool.run(partial(train, each), tmp_path)) for each in jobs)
    assert staged == pytest.approx(tensors, rel=1e-12)
    assert staged != pytest.approx(plain, rel=1e-7)


def _tensors(ours: ss.Job, context: RankContext) -> dict[str, bytes]:
    trainer = Trainer(ours, context, context.events.path.parent)
    for step in range(1, ours.steps + 1):
        trainer.take_step(step)
    trainer.strategy.close()
    return {name: p.detach().numpy().tobytes() for name, p in trainer.strategy.updated_parameters}


@pytest.mark.sampled
@pytest.mark.ranks(4)
@pytest.mark.parametrize("compression", ["int8", "topk", "powersgd", "sign", "randomk", "qsgd", "fp8"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_copies_stay_equal_to_the_bit_with_compressed_gradients(
    pool: RankPool, tmp_path: Path, schedule: str, compression: str
) -> None:
    """Replicas have the same layers, and the first and the last stage the embedding."""
    optimizer = ss.Optimizer("sgd", lr=0.01, momentum=0.0)
    settings = {"ratio": 0.1} if compression in ("topk", "randomk") else {}
    ours = job(
        strategy=mesh("ring", schedule), world_size=4, batch=ss.Batch(48, micro_batch=6), model=deeper_gpt,
        compression=ss.Compression(compression, **settings), optimizer=optimizer, precision="fp32", steps=6,
    )  # fmt: skip
    ranks = pool.run(partial(_tensors, ours), tmp_path)
    for name in {name for tensors in ranks for name in tensors}:
        copies = [tensors[name] for tensors in ranks if name in tensors]
        assert len(copies) == (4 if name == "tokens.weight" else 2)
        assert len({*copies}) == 1


class _Scaled(nn.Module):
    """A linear layer whose weight other layers may use too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def _tied_in_the_middle() -> nn.Module:
    torch.manual_seed(0)
    shared, own = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))
    lower, upper = (nn.Flatten(), nn.Linear(64, 16), _Scaled(shared)), (_Scaled(own), _Scaled(shared))
    return nn.Sequential(*lower, nn.ReLU(inplace=True), *upper, nn.Linear(16, 10))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("data", "schedule"),
    [("zero-3", "1f1b"), *(pytest.param(*each, marks=pytest.mark.weekly) for each in [
        ("zero-2", "zb-h1"), ("zero-1", "1f1b"), ("zero-2", "interleaved"), ("zero-3", "zbv")
    ])],
)  # fmt: skip
def test_stages_with_a_tied_weight_follow_one_process(
    pool: RankPool, tmp_path: Path, data: str, schedule: str
) -> None:
    fields: dict[str, Any] = {"model": _tied_in_the_middle, "data": "digits", "steps": 3, "clip_norm": 0.5}
    split = (3, 4) if schedule in ("1f1b", "zb-h1") else (2, 1, 2, 2)  # a stage changes its input in place
    ours = job(
        strategy=mesh(data, schedule, split=split), world_size=4, batch=ss.Batch(48, micro_batch=6), **fields
    )
    hold_losses(pool, tmp_path, ours)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("changes_targets", "told"),
    [(True, "ranks of a pipeline group have read different"), (False, "nothing was")],
)
def test_stages_may_read_different_inputs_but_not_different_targets(
    pool: RankPool, tmp_path: Path, changes_targets: bool, told: str
) -> None:
    refused = refusals(pool, tmp_path, mesh(split="even"), changes_targets=changes_targets)
    assert all(told in refusal for refusal in refused)


# Eight ranks.


@pytest.mark.slow
def test_three_axes_follow_one_process(eight: RankPool, tmp_path: Path) -> None:
    follow(eight, tmp_path, mesh(ZERO_1, tensor=2), tiny_gpt)


@pytest.mark.weekly
@pytest.mark.parametrize("data", ["ring", "tree", "all-reduce", ss.Zero2(), ss.Zero3()])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lars"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_any_three_axes_follow_one_process(
    eight: RankPool, tmp_path: Path, data: Any, optimizer: str, precision: str
) -> None:
    follow(eight, tmp_path, mesh(data, tensor=2), tiny_gpt, optimizer=optimizer, precision=precision)


# Checkpoints, evaluations and refusals.

CHAIN: dict[str, ss.Strategy | None] = {
    "stages of rings": mesh(), "zero-3": ss.Zero3(), "one process": None, "stages of zero-1": mesh(ZERO_1),
    "stages of divided layers": mesh(tensor=2), "stages of zero-3": mesh("zero-3"),
    "parts of zero-1": ss.Strategy("mesh", data="zero-1", tensor=2), "stages of zero-2": mesh("zero-2", "zb-h1"),
}  # fmt: skip


def _through_layouts(optimizer: str, each: int, folder: Path, context: RankContext) -> list[float | None]:
    losses: list[float | None] = []
    before: Path | None = None
    for number, strategy in enumerate(CHAIN.values()):
        here, is_alone = folder / str(number), strategy is None
        ours = job(
            optimizer=OPTIMIZERS[optimizer], steps=len(CHAIN) * each, clip_norm=0.5,
            strategy=strategy or "single", world_size=1 if is_alone else 4,
            batch=ss.Batch(48, micro_batch=48 if is_alone else 6),
        )  # fmt: skip
        here.mkdir(exist_ok=True)
        trainer = Trainer(ours, context_for(ours, context), here)
        if before is not None:
            trainer.resume(before)
        losses += [trainer.take_step(step) for step in range(number * each + 1, (number + 1) * each + 1)]
        if not is_alone or context.rank == 0:
            trainer.checkpoints.save((number + 1) * each)
        trainer.strategy.close()
        dist.barrier()
        before = here / "checkpoints"
    return losses


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_checkpoint_resumes_under_any_layout(pool: RankPool, tmp_path: Path, optimizer: str) -> None:
    each = 2
    results = pool.run(partial(_through_layouts, optimizer, each, tmp_path), tmp_path)
    steps = len(CHAIN) * each
    alone = job(optimizer=OPTIMIZERS[optimizer], steps=steps, strategy="single", world_size=1, clip_norm=0.5)
    expected, *_ = pool.run(partial(losses_alone, alone), tmp_path)
    assert mean_losses([(row, {}) for row in results]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", ["zero-3"])
def test_an_evaluation_covers_every_replica_and_changes_nothing(
    pool: RankPool, tmp_path: Path, data: str
) -> None:
    ours = job(strategy=mesh(data), world_size=4, batch=ss.Batch(48, micro_batch=6))
    hold_evaluation(pool, tmp_path, ours)


def _seed(ours: ss.Job, context: RankContext) -> int:
    Trainer(ours, context, context.events.path.parent).strategy.close()
    return torch.initial_seed()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("tensor", "number"), [(1, 4), (2, 2)])
def test_replicas_and_stages_draw_numbers_of_their_own(
    pool: RankPool, tmp_path: Path, tensor: int, number: int
) -> None:
    ours = job(strategy=mesh(tensor=tensor), world_size=4, batch=ss.Batch(48, micro_batch=6))
    assert len({*pool.run(partial(_seed, ours), tmp_path)}) == number


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"strategy": mesh(ss.Zero3(replicas=2)), "world_size": 8},
            "strategy.data.replicas=2 is not available with",
        ),
        (
            {"compression": "local-sgd"},
            "compression='local-sgd' is not available with strategy.pipeline=2 yet",
        ),
        (
            {"world_size": 6, "strategy": mesh(tensor=2)},
            "strategy.pipeline=2 does not divide world_size=6 / tensor=2",
        ),
        (
            {"strategy": mesh(), "world_size": 2, "batch": ss.Batch(48, micro_batch=48)},
            "makes 1 micro-batches per pass",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_sentence(changes: dict[str, Any], told: str) -> None:
    fields: dict[str, Any] = {
        "strategy": mesh(),
        "world_size": 4,
        "batch": ss.Batch(48, micro_batch=6),
        **changes,
    }
    with pytest.raises(SpecError) as caught:
        job(**fields)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
