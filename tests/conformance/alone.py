"""Trainers of one rank, in the test's own process or on each rank of a pool, and what tests need of any trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardscope as ss
from conformance.runs import small_job
from shardscope.runlog.writer import EventWriter
from shardscope.training.context import RankContext
from shardscope.training.evaluate import evaluate
from shardscope.training.meter import Meter
from shardscope.training.sharding import local
from shardscope.training.trainer import Trainer


class Never:
    """The control of a training that nobody stops."""

    def should_stop(self, step: int) -> bool:
        """Never."""
        return False


def context_for(job: ss.Job, context: RankContext) -> RankContext:
    """The context with which a rank of a pool trains a job: without the other ranks if the job has one rank."""
    return context if job.world_size > 1 else replace(context, rank=0, world_size=1, group=None)


def trainer_on(job: ss.Job, context: RankContext) -> Trainer:
    """A trainer on a rank of a pool; see `context_for`."""
    return Trainer(job, context_for(job, context), context.events.path.parent)


def losses_alone(job: ss.Job, context: RankContext) -> list[float | None]:
    """The loss of each step of a job with one rank."""
    trainer = trainer_on(job, context)
    return [trainer.take_step(step) for step in range(1, job.steps + 1)]


def evaluation_of(trainer: Trainer) -> Any:
    """The result of evaluating a trainer's model on its validation data."""
    assert trainer.data.validation is not None
    return evaluate(
        trainer.strategy, trainer.data.validation, trainer.loss_function, trainer._place, trainer.weights.found
    )  # fmt: skip


def evaluated(ours: ss.Job, context: RankContext) -> tuple[Any, float | None]:
    """The result of evaluating a job's model before its first step, and the loss of this step."""
    trainer = trainer_on(ours, context)
    found = evaluation_of(trainer)
    after = trainer.take_step(1)
    trainer.strategy.close()
    return found, after


def trainer_in(folder: Path, **changes: Any) -> Trainer:
    """A trainer that writes its events and checkpoints below `folder`; four steps, a checkpoint at every second."""
    folder.mkdir(parents=True, exist_ok=True)
    context = RankContext(0, 1, torch.device("cpu"), Meter(), EventWriter(folder / "rank-0.jsonl", 0))
    fields: dict[str, Any] = {
        "strategy": "single",
        "world_size": 1,
        "steps": 4,
        "checkpoint": ss.Checkpoint(every=2),
    }
    return Trainer(small_job(**{**fields, **changes}), context, folder)


def parameters_of(trainer: Trainer) -> list[Tensor]:
    """This rank's own; whole ones can no longer be gathered when a run is over."""
    return [local(p.detach()).clone() for p in trainer.model.parameters()]
