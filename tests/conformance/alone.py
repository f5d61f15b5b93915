"""A trainer of one rank in the test's own process, and what tests need of any trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardscope as ss
from conformance.runs import small_job
from shardscope.runlog.writer import EventWriter
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.sharding import local
from shardscope.training.trainer import Trainer


class Never:
    """The control of a training that nobody stops."""

    def should_stop(self, step: int) -> bool:
        """Never."""
        return False


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
