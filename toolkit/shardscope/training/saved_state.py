"""Refuses, before the first step of a job that saves, state of its model and optimizer that cannot be saved."""

from __future__ import annotations

import torch
from torch import nn

from shardscope.errors import SpecError
from shardscope.spec import Job
from shardscope.training.optim.brought import is_brought
from shardscope.training.strategies.base import RankStrategy


def require_saveable(job: Job, strategy: RankStrategy, optimizer: torch.optim.Optimizer) -> None:
    """Raise an error now, not at the first checkpoint, if state of a module or the optimizer cannot be saved.

    Raises:
        CheckpointError: A module's extra state cannot be saved.
        SpecError: The optimizer cannot be resumed from what would be saved.
    """
    has_replicas = job.recovery is not None and job.recovery.replica_every is not None
    if not job.saves_checkpoints and not has_replicas:
        return
    if is_brought(job.optimizer):
        _require_resumable(job, strategy, optimizer)
    for name, module in strategy.model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            from shardscope.training.checkpoint.values import encode

            encode(f"model.{name}{'.' * bool(name)}_extra_state", module.get_extra_state())


def _require_resumable(job: Job, strategy: RankStrategy, optimizer: torch.optim.Optimizer) -> None:
    from shardscope.training.checkpoint.agreement import gather_items  # only for optimizers of users
    from shardscope.training.checkpoint.rehearsal import Rehearsed, rehearsed

    named, is_split = strategy.named_optimizer(optimizer), strategy.holding.is_split
    told = Rehearsed()
    if named is not None:
        trained = sum(p.requires_grad for p in strategy.model.parameters())
        is_divided = is_split or len(named.parameters) < trained
        told = rehearsed(named, is_split=is_split, is_resized=is_divided and job.elastic is not None)
    every = gather_items(strategy.context, told) if is_split else [told]  # pieces may differ between ranks
    problem = next((each.problem for each in every if each.problem), None)
    if problem is not None:
        raise SpecError(
            f"optimizer={job.optimizer.name!r} cannot be resumed: {problem}; keep its state in optimizer.state or in "
            "param_groups"
        )
    if told.untried is not None:
        strategy.context.events.emit(
            "optimizer_note", step=0,
            text=f"optimizer={job.optimizer.name!r} was not tried before the first step, because it fails on small "
            f"copies of the parameters ({told.untried[:200]}), so a resumed run may train otherwise",
        )  # fmt: skip
