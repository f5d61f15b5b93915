"""Optimizers of the user's own under ZeRO, whose ranks hold pieces: right as on one process, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import shardscope as ss
from conformance.alone import trainer_on
from conformance.ranks import RankPool
from conformance.strategy import job, mean_losses, relative_difference, tiny_gpt
from shardscope.training.context import RankContext
from shardscope.training.user_optimizer import prepare_user_optimizer


class ByNorm(torch.optim.SGD):
    """Divides each gradient by a norm: of what the rank holds, or of the whole tensor."""

    def __init__(self, params: Any, lr: float, reduce_squares: Any) -> None:
        super().__init__(params, lr)
        self.reduce_squares = reduce_squares

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take a step."""
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        squares = torch.stack([p.grad.double().square().sum() for p in held])
        if self.reduce_squares is not None:
            squares = self.reduce_squares(squares)
        for p, norm in zip(held, squares.sqrt(), strict=True):
            p.grad.div_(norm)
        return super().step(closure)


class MatricesFaster(torch.optim.SGD):
    """Takes larger steps for matrices, which it tells by what the rank holds."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take a step."""
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(2 if p.ndim > 1 else 1)
        return super().step(closure)


class ByStatistic(torch.optim.SGD):
    """Scales or shifts each gradient by a statistic of what the rank holds, which does not grow with its size."""

    def __init__(self, params: Any, lr: float, statistic: str) -> None:
        super().__init__(params, lr)
        self.statistic = statistic

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take a step."""
        for p in self.param_groups[0]["params"]:
            if p.grad is None or not p.numel():
                continue
            if self.statistic == "mean":
                p.grad.sub_(p.grad.mean())
            else:
                p.grad.div_(
                    p.grad.abs().max() if self.statistic == "maximum" else p.grad.square().mean().sqrt()
                )
        return super().step(closure)


class Own(ss.Optimizer):
    """A rule of the user's own."""

    name = "own-rule"
    lr: float = 0.05
    norm: Literal["of pieces", "of tensors", "none", "rms", "maximum", "mean", "adafactor"] = "of pieces"

    def build(self, parameters: Any) -> torch.optim.Optimizer:
        if self.norm == "none":
            return MatricesFaster(parameters.groups(), self.lr)
        if self.norm == "adafactor":
            return torch.optim.Adafactor(parameters.groups(), lr=self.lr)
        if self.norm in {"rms", "maximum", "mean"}:
            return ByStatistic(parameters.groups(), self.lr, self.norm)
        sums = parameters.reduce_squares if self.norm == "of tensors" else None
        return ByNorm(parameters.groups(), self.lr, sums)


def _trained(ours: ss.Job, context: RankContext) -> Any:
    trainer = trainer_on(ours, context)
    prepare_user_optimizer(ours, trainer.strategy, trainer.optimizer)
    losses = [trainer.take_step(step) for step in range(1, ours.steps + 1)]
    found = {name: p.detach().clone() for name, p in trainer.strategy.full_parameters().items()}
    trainer.strategy.close()
    return losses, found


def _refused(ours: ss.Job, context: RankContext) -> str:
    trainer = trainer_on(ours, context)
    with pytest.raises(ss.SpecError) as refused:
        prepare_user_optimizer(ours, trainer.strategy, trainer.optimizer)
    trainer.strategy.close()
    return str(refused.value)


@pytest.mark.parametrize(
    ("strategy", "norm"),
    [
        *((strategy, "of pieces") for strategy in ("zero-1", "zero-2", "zero-3")),
        *(
            (strategy, norm)
            for strategy in ("zero-1", "zero-3")
            for norm in ("rms", "maximum", "mean", "adafactor")
        ),
    ],
)
def test_a_rule_with_statistics_of_pieces_is_refused(
    pool: RankPool, tmp_path: Path, strategy: str, norm: Any
) -> None:
    ours = job(strategy=strategy, world_size=pool.world_size, model=tiny_gpt, optimizer=Own(norm=norm))
    for refusal in pool.run(lambda context: _refused(ours, context), tmp_path):
        assert "it updates a part of a tensor differently than the whole tensor" in refusal
        assert "'tree' or 'hierarchical', whose ranks hold whole tensors" in refusal


def test_a_rule_for_matrices_is_refused_where_pieces_are_vectors(pool: RankPool, tmp_path: Path) -> None:
    ours = job(strategy="zero-1", world_size=pool.world_size, model=tiny_gpt, optimizer=Own(norm="none"))
    for refusal in pool.run(lambda context: _refused(ours, context), tmp_path):
        assert "it updates a part of a tensor differently than the whole tensor" in refusal


@pytest.mark.parametrize(
    ("strategy", "norm"), [("zero-1", "of tensors"), ("zero-3", "of tensors"), ("zero-3", "none")]
)
def test_a_rule_that_knows_of_pieces_follows_one_process(
    pool: RankPool, tmp_path: Path, strategy: str, norm: Any
) -> None:
    fields = {"model": tiny_gpt, "optimizer": Own(norm=norm), "steps": 5}
    ours = job(strategy=strategy, world_size=pool.world_size, **fields)
    results = pool.run(lambda context: _trained(ours, context), tmp_path)
    losses, parameters = pool.run(lambda c: _trained(job(strategy="single", **fields), c), tmp_path)[0]
    assert mean_losses(results) == pytest.approx(losses, rel=1e-9)
    assert all(relative_difference(found, parameters) < 1e-9 for _, found in results)
