"""The conformance class that every synchronous strategy passes: it follows one process.

A test module for a strategy subclasses `StrategyConformance` and names its spec (and a deeper `model` or fewer
`cases`, where it needs them). The oracle is the same job on one
process, with the whole batch at once and nothing recomputed; whatever the strategy does with ranks, micro-batches and
recomputation, losses and parameters after 20 steps must be those of the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.ranks import RankPool, over_both
from shardscope.runlog.writer import EventWriter
from shardscope.spec.models import GPTConfig
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.models import build_model
from shardscope.training.trainer import Trainer

STEPS = 20
OPTIMIZERS = {
    "sgd": ss.Optimizer("sgd", lr=0.05, momentum=0.0),
    "nesterov": ss.Optimizer("nesterov", lr=0.05),
    "adamw": ss.Optimizer("adamw", lr=1e-3),
    "lamb": ss.Optimizer("lamb", lr=5e-3),
    "lars": ss.Optimizer("lars", lr=0.5),
}
Case = tuple[str, int, str, float | None]
"""Precision, accumulation, recomputation, clip."""
EVERY_CASE: list[Case] = [
    (precision, accumulation, recompute, None)
    for precision in ("fp64", "fp32")
    for accumulation in (1, 4)
    for recompute in ("none", "selective", "full")
]
FEW_CASES: list[Case] = [("fp64", 1, "selective", None), ("fp64", 4, "full", 0.5), ("fp32", 4, "none", 0.5)]
"""Between them they have all of it, in a quarter of the time."""
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16-mixed": 2e-2}


def tiny_gpt() -> nn.Module:
    """A GPT small enough for 20 steps in a blink, with every kind of parameter a GPT has."""
    return build_model(GPTConfig(layers=1, hidden=16, heads=2, vocab=256, seq=16, ffn=32))


def job(**changes: Any) -> ss.Job:
    """The job of the matrix: a tiny GPT on the standard library's source."""
    fields: dict[str, Any] = {
        "model": tiny_gpt,
        "data": "python-source",
        "steps": STEPS,
        "batch": 48,
        "precision": "fp64",
    }
    return ss.Job(**{**fields, **changes})


Result = tuple[list[float | None], dict[str, Tensor]]


def train(job: ss.Job, context: RankContext) -> Result:
    """Losses of this rank (None where it computes none) and full parameters after training."""
    trainer = Trainer(job, context, context.events.path.parent)
    losses = [trainer.take_step(step) for step in range(1, job.steps + 1)]
    trainer.strategy.synchronize(job.steps)
    parameters = {name: p.detach().double().clone() for name, p in trainer.strategy.full_parameters().items()}
    trainer.strategy.close()
    return losses, parameters


@cache
def oracle(
    model: Callable[[], nn.Module], optimizer: str, precision: str, clip_norm: float | None
) -> tuple[list[float], dict[str, Tensor]]:
    """The job on one process."""
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, EventWriter(Path(folder) / "rank-0.jsonl", 0) as events:
        alone = RankContext(0, 1, torch.device("cpu"), Meter(), events)
        one = job(
            model=model, strategy="single", optimizer=OPTIMIZERS[optimizer], precision=precision,
            clip_norm=clip_norm,
        )  # fmt: skip
        losses, parameters = train(one, alone)
    return [loss for loss in losses if loss is not None], parameters


def mean_losses(results: list[Result]) -> list[float]:
    """The loss of each step, over the ranks that computed one."""
    steps = zip(*(losses for losses, _ in results), strict=True)
    known = [[loss for loss in row if loss is not None] for row in steps]
    return [sum(row) / len(row) for row in known]


def relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Of all parameters taken as one vector."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[name] - theirs[name]).square().sum()) for name in ours)
    size = sum(float(value.square().sum()) for value in theirs.values())
    return (difference / size) ** 0.5


class StrategyConformance:
    """Subclass it, set `strategy`, and the strategy is held against one process."""

    strategy: ClassVar[Any]
    model: ClassVar[Callable[[], nn.Module]] = staticmethod(tiny_gpt)
    cases: ClassVar[list[Case]] = FEW_CASES

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        over_both(metafunc)
        if "recompute" in metafunc.fixturenames:
            metafunc.parametrize(("precision", "accumulation", "recompute", "clip_norm"), self.cases)

    def follow(self, pool: RankPool, folder: Path, *, optimizer: str, precision: str, **changes: Any) -> None:
        clip_norm = changes.get("clip_norm")
        accumulation = changes.pop("accumulation", 1)
        ours = job(
            model=type(self).model, strategy=self.strategy, world_size=pool.world_size,
            optimizer=OPTIMIZERS[optimizer], batch=self.batch(pool.world_size, accumulation), precision=precision,
            **changes,
        )  # fmt: skip
        results = pool.run(_training(ours), folder)
        expected_losses, expected = oracle(type(self).model, optimizer, precision, clip_norm)
        losses = mean_losses(results)
        bound = TOLERANCE[precision]
        assert len(losses) == STEPS
        assert losses == pytest.approx(expected_losses, rel=bound)
        assert losses[-1] < losses[0]
        for _, parameters in results:
            assert relative_difference(parameters, expected) < bound

    def batch(self, world_size: int, accumulation: int) -> ss.Batch:
        """48 samples, so many micro-batches a rank."""
        data_ranks = ss.Strategy.resolve(self.strategy).num_data_ranks(world_size)
        return ss.Batch(48, micro_batch=48 // data_ranks // accumulation)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_follows_one_process(
        self,
        pool: RankPool,
        tmp_path: Path,
        optimizer: str,
        accumulation: int,
        recompute: str,
        clip_norm: float | None,
        precision: str,
    ) -> None:
        self.follow(
            pool,
            tmp_path,
            optimizer=optimizer,
            precision=precision,
            accumulation=accumulation,
            recompute=recompute,
            clip_norm=clip_norm,
        )

    @pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
    def test_stays_near_one_process_in_bf16(self, pool: RankPool, tmp_path: Path, optimizer: str) -> None:
        self.follow(pool, tmp_path, optimizer=optimizer, precision="bf16-mixed")

    def test_all_ranks_hold_the_same_parameters(self, pool: RankPool, tmp_path: Path) -> None:
        ours = job(
            model=type(self).model, strategy=self.strategy, world_size=pool.world_size, optimizer="adamw",
            batch=self.batch(pool.world_size, 1), precision="fp32",
        )  # fmt: skip
        (_, first), *others = pool.run(_training(ours), tmp_path)
        for _, parameters in others:
            assert all(torch.equal(parameters[name], first[name]) for name in first)


class FullConformance(StrategyConformance):
    """Every case there is: for the strategies whose forward and backward pass the others share."""

    cases = EVERY_CASE

    @pytest.mark.parametrize("precision", ["fp64", "fp32"])
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_clips_by_the_global_norm(
        self, pool: RankPool, tmp_path: Path, optimizer: str, precision: str
    ) -> None:
        self.follow(pool, tmp_path, optimizer=optimizer, precision=precision, clip_norm=0.5)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_stays_near_one_process_in_bf16(self, pool: RankPool, tmp_path: Path, optimizer: str) -> None:
        self.follow(pool, tmp_path, optimizer=optimizer, precision="bf16-mixed")


def _training(ours: ss.Job) -> Callable[[RankContext], Any]:
    from conformance import strategy as here

    return lambda context: here.train(ours, context)
