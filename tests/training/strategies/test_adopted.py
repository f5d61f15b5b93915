"""Strategies whose gradients come from passes that another object runs: they update as they do after their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import OPTIMIZERS, job, tiny_gpt
from shardscope.training.context import RankContext
from shardscope.training.strategies import build_strategy
from shardscope.training.strategies.base import RankStrategy

DATA = {
    "ring": ss.Ring(bucket_mb=0.02), "tree": ss.Tree(bucket_mb=0.02), "all-reduce": ss.AllReduce(bucket_mb=0.02),
    "hierarchical": ss.Hierarchical(per_node=2, bucket_mb=0.02), "zero-1": ss.Zero1(bucket_mb=0.02),
    "zero-1 stock": ss.Strategy("zero-1:backend"), "zero-2": ss.Zero2(), "zero-3": ss.Zero3(),
}  # fmt: skip
Rows = Sequence[tuple[Tensor, Tensor]]


def _loss(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _rows(context: RankContext, step: int) -> Rows:
    draw = torch.Generator().manual_seed(100 * step + context.rank)
    return [
        (
            torch.randint(256, (2, 16), generator=draw),
            torch.randint(256, (2, 16), generator=draw),
        )
        for _ in range(2)
    ]


def _own_step(strategy: RankStrategy, rows: Rows, optimizer: torch.optim.Optimizer) -> None:
    strategy.step(rows, _loss, optimizer)


def _adopted_step(strategy: RankStrategy, rows: Rows, optimizer: torch.optim.Optimizer) -> None:
    strategy.begin_step(optimizer, len(rows))
    for inputs, targets in rows:
        (_loss(strategy.model(inputs), targets) / len(rows)).backward()
    strategy.finish_exchange()
    strategy.precision.update(
        optimizer, strategy.parameters, 0.5,
        reduce_square=strategy.reduce_grad_square, duplicate_grad_params=strategy.duplicate_grad_params,
    )  # fmt: skip
    strategy.end_step(skipped=False)


def _trained(ours: ss.Job, adopts: bool, context: RankContext) -> dict[str, Tensor]:
    torch.manual_seed(context.rank if adopts else 0)  # the ranks of an axis start alike, as rank 0 does
    model, strategy = tiny_gpt().double(), build_strategy(ours, context)
    strategy.example = lambda: _rows(context, 0)[0]
    if adopts:
        strategy.adopt(model, [model], list(model.named_parameters()))
    else:
        strategy.setup(model)
    optimizer = strategy.build_optimizer()
    take = _adopted_step if adopts else _own_step
    for step in range(1, 4):
        take(strategy, _rows(context, step), optimizer)
    found = {name: tensor.detach().clone() for name, tensor in strategy.full_parameters().items()}
    strategy.close()
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("data", DATA)
def test_an_adopted_model_follows_one_that_is_wrapped(
    pool: RankPool, tmp_path: Path, data: str, optimizer: str
) -> None:
    ours = job(
        strategy=DATA[data], world_size=2, optimizer=OPTIMIZERS[optimizer], clip_norm=0.5,
        batch=ss.Batch(8, micro_batch=2),
    )  # fmt: skip
    (expected, _), adopted = (
        pool.run(partial(_trained, ours, False), tmp_path),
        pool.run(partial(_trained, ours, True), tmp_path),
    )
    for found in adopted:
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-13)


def _unused(ours: ss.Job, context: RankContext) -> str:
    model, strategy = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), build_strategy(ours, context)
    strategy.adopt(model, [model], list(model.named_parameters()))
    strategy.begin_step(strategy.build_optimizer(), 1)
    model[0](torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    try:
        strategy.finish_exchange()
    except ss.SpecError as error:
        return str(error)
    finally:
        strategy.close()
    return ""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("data", ["ring", "zero-1"])
def test_an_adopted_parameter_without_a_gradient_is_refused(
    pool: RankPool, tmp_path: Path, data: str
) -> None:
    ours = job(strategy=DATA[data], world_size=2, batch=ss.Batch(8, micro_batch=4))
    for message in pool.run(partial(_unused, ours), tmp_path):
        assert message.startswith("parameter '1.")
        assert "has no gradient from the loss" in message
