"""Optimizers of the user's own with a divided model: element-wise rules train, others are refused by a trial."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.alone import trainer_on
from conformance.ranks import RankPool
from conformance.strategy import job, mean_losses, relative_difference, tiny_gpt
from shardscope.spec.models import GPTConfig
from shardscope.training.context import RankContext
from shardscope.training.models import build_model
from shardscope.training.optim import TrainedParameters, built_by
from shardscope.training.optim.state import NamedOptimizer
from shardscope.training.optim.trial import updates_parts_alike
from shardscope.training.user_optimizer import prepare_user_optimizer


class Rule(torch.optim.Optimizer):
    """Gradient descent with a scale, which some rules take from the whole gradient."""

    def __init__(self, params: Any, lr: float, scale: str) -> None:
        super().__init__(params, {"lr": lr})
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            total = torch.stack([grad.norm() for grad in grads]).norm()
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / self._size(p.grad, self.state[p], total))

    def _size(self, grad: torch.Tensor, state: dict[str, Any], total: torch.Tensor) -> Any:
        match self.scale:
            case "norm":
                return grad.norm()
            case "of all":
                return total
            case "clipped":
                return max(1.0, float(grad.norm()) / 50)
            case "rows":
                return grad.abs().mean(-1, keepdim=True) if grad.ndim > 1 else 1.0
            case "noise":
                return 1 + torch.rand_like(grad)
        state["seen"] = state.get("seen", torch.ones_like(grad)) + grad.square()
        return state["seen"].sqrt()


class Own(ss.Optimizer):
    """A rule of the user's own."""

    name = "own-rule"
    lr: float = 0.05
    scale: Literal["elements", "norm", "of all", "clipped", "rows", "noise"] = "elements"

    def build(self, parameters: Any) -> torch.optim.Optimizer:
        return Rule(parameters.groups(), self.lr, self.scale)


@pytest.mark.parametrize(
    ("scale", "is_alike"),
    [("elements", True), *((scale, False) for scale in ("norm", "of all", "clipped", "rows", "noise"))],
)
def test_only_an_element_wise_rule_updates_parts_as_whole_tensors(scale: Any, is_alike: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    named = [*model.named_parameters()]
    optimizer = NamedOptimizer(built_by(Own(scale=scale), TrainedParameters(named)), {p: n for n, p in named})
    assert updates_parts_alike(optimizer, {"0.weight": 0, "0.bias": 0, "1.weight": 1}) == is_alike
    assert updates_parts_alike(optimizer, {}) or scale == "noise"


def four_heads() -> nn.Module:
    return build_model(GPTConfig(layers=1, hidden=16, heads=4, vocab=256, seq=16, ffn=32))


def _trained(ours: ss.Job, context: RankContext) -> Any:
    trainer = trainer_on(ours, context)
    try:
        prepare_user_optimizer(ours, trainer.strategy, trainer.optimizer)
    except ss.SpecError as error:
        return str(error)
    losses = [trainer.take_step(step) for step in range(1, ours.steps + 1)]
    found = {name: p.detach().clone() for name, p in trainer.strategy.full_parameters().items()}
    trainer.strategy.close()
    return losses, found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", ["ring", "zero-1", "zero-3"])
def test_an_element_wise_rule_of_ones_own_follows_one_process(
    pool: RankPool, tmp_path: Path, data: str
) -> None:
    fields = {"model": tiny_gpt, "optimizer": Own(), "clip_norm": 0.5}
    ours = job(strategy=ss.Strategy("mesh", data=data, tensor=2), world_size=4, **fields)
    results = pool.run(partial(_trained, ours), tmp_path)
    losses, parameters = pool.run(partial(_trained, job(strategy="single", **fields)), tmp_path)[0]
    assert mean_losses(results) == pytest.approx(losses, rel=1e-9)
    assert all(relative_difference(found, parameters) < 1e-9 for _, found in results)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", ["ring", "zero-1", pytest.param("zero-3", marks=pytest.mark.weekly)])
def test_an_own_rule_trains_the_stages_of_replicas(pool: RankPool, tmp_path: Path, data: str) -> None:
    fields = {"model": tiny_gpt, "optimizer": Own(), "clip_norm": 0.5, "steps": 5}
    strategy, batch = ss.Strategy("mesh", data=data, pipeline=2), ss.Batch(48, micro_batch=6)
    ours = job(strategy=strategy, world_size=4, batch=batch, **fields)
    results = pool.run(partial(_trained, ours), tmp_path)
    losses, parameters = pool.run(partial(_trained, job(strategy="single", **fields)), tmp_path)[0]
    assert mean_losses(results) == pytest.approx(losses, rel=1e-9)
    assert all(relative_difference(found, parameters) < 1e-9 for _, found in results)


@pytest.mark.ranks(4)
def test_an_own_rule_that_draws_numbers_keeps_replicas_of_stages_equal(
    pool: RankPool, tmp_path: Path
) -> None:
    ours = job(
        strategy=ss.Strategy("mesh", pipeline=2), world_size=4, batch=ss.Batch(48, micro_batch=6), steps=3,
        optimizer=Own(scale="noise"),
    )  # fmt: skip
    results = pool.run(partial(_trained, ours), tmp_path)
    assert all(relative_difference(found, results[0][1]) == 0 for _, found in results)


class Averaging(torch.optim.SGD):
    """Averages the gradients over all processes itself."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take a step."""
        for p in self.param_groups[0]["params"]:
            torch.distributed.all_reduce(p.grad, torch.distributed.ReduceOp.AVG)
        return super().step(closure)


class OwnAveraging(ss.Optimizer):
    """A rule of the user's own that communicates."""

    name = "own-averaging"
    lr: float = 0.05

    def build(self, parameters: Any) -> torch.optim.Optimizer:
        return Averaging(parameters.groups(), self.lr)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 4}, {"pipeline": 2}])
def test_a_rule_that_would_join_different_parts_is_refused(
    pool: RankPool, tmp_path: Path, axes: dict[str, int]
) -> None:
    ours = job(
        strategy=ss.Strategy("mesh", **axes), world_size=4, batch=ss.Batch(48, micro_batch=6),
        optimizer=OwnAveraging(), model=four_heads,
    )  # fmt: skip
    for refusal in pool.run(partial(_trained, ours), tmp_path):
        assert "whose ranks update different parameters" in refusal


@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", ["ring", "zero-1"])
def test_a_rule_with_norms_of_whole_tensors_is_refused(pool: RankPool, tmp_path: Path, data: str) -> None:
    strategy = ss.Strategy("mesh", data=data, tensor=2)
    ours = job(strategy=strategy, world_size=4, model=tiny_gpt, optimizer=Own(scale="norm"))
    for refusal in pool.run(partial(_trained, ours), tmp_path):
        assert "it updates a part of a tensor differently than the whole tensor" in refusal
