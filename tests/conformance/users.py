"""Models and data as users bring them, and a plain training loop to hold strategies against.

    case = Case(model=..., data=..., loss=...)
    follow(pool, folder, case, strategy, plain(case, loss))

The loop is plain torch on one process: of the toolkit it takes the order of the rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import mean_losses, relative_difference
from shardscope.training.context import RankContext
from shardscope.training.data import GlobalSampler, call, load_data, read_batch

STEPS, BATCH, MICRO, LR = 3, 24, 2, 0.1


@dataclass(frozen=True)
class Case:
    """A job of the user's: `model` and `data` without arguments, `loss` of output and targets."""

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Any = "cross-entropy"

    def job(self, strategy: Any, world_size: int, **changes: Any) -> ss.Job:
        """In fp64 by SGD without momentum, so that what is added up in another order stays close."""
        fields = {
            "precision": "fp64", "steps": STEPS, "batch": ss.Batch(BATCH, micro_batch=MICRO),
            "optimizer": ss.Optimizer("sgd", lr=LR, momentum=0.0),
        }  # fmt: skip
        return ss.Job(
            model=self.model, data=self.data, loss=self.loss, strategy=strategy, world_size=world_size,
            **{**fields, **changes},
        )  # fmt: skip


def plain(case: Case, loss: Callable[[Any, Any], Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of a loop as one writes it by hand."""
    torch.manual_seed(0)
    model, data = case.model().double(), load_data(case.data).train
    sampler = GlobalSampler(len(data), BATCH, seed=0)
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        total = 0.0
        for rows in sampler.indices(step).split(MICRO):
            inputs, targets = read_batch(data, rows)
            part = loss(call(model, _doubled(inputs)), _doubled(targets)) * MICRO / BATCH
            part.backward()
            total += part.item()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(LR * parameter.grad)
        losses.append(total)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _doubled(part) for key, part in value.items()}
    return type(value)(map(_doubled, value)) if isinstance(value, list | tuple) else value


def follow(
    pool: RankPool,
    folder: Path,
    case: Case,
    strategy: Any,
    expected: tuple[list[float], dict[str, Tensor]],
    **changes: Any,
) -> list[dict[str, Any]]:
    """Hold a strategy against `expected`; returns the last evaluation on every rank."""
    ours = case.job(strategy, pool.world_size, **changes)
    results = pool.run(lambda context: _trained(ours, context), folder)
    losses = mean_losses([(losses, parameters) for losses, parameters, _ in results])
    assert all(
        abs(ours - theirs) <= 1e-9 * abs(theirs) for ours, theirs in zip(losses, expected[0], strict=True)
    )
    for _, parameters, _ in results:
        assert relative_difference(parameters, expected[1]) < 1e-9
    return [evaluation for *_, evaluation in results]


def _trained(job: ss.Job, context: RankContext) -> Any:
    from shardscope.training.evaluate import evaluate
    from shardscope.training.trainer import Trainer

    trainer = Trainer(job, context, context.events.path.parent)
    losses = [trainer.take_step(step) for step in range(1, job.steps + 1)]
    trainer.strategy.synchronize(job.steps)
    found = evaluate(trainer.strategy, trainer.data.test, trainer.loss_function, trainer._place)
    parameters = {name: p.detach().clone() for name, p in trainer.strategy.full_parameters().items()}
    trainer.strategy.close()
    return losses, parameters, found
