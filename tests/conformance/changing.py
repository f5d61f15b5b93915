"""Sequences that differ between ranks, and what a trainer says to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import job, train
from shardscope.training.context import RankContext


class Changing(torch.utils.data.Dataset[Any]):
    """Sequences that differ between ranks, in their inputs or also in their targets."""

    def __init__(self, *, changes_targets: bool) -> None:
        self.changes_targets = changes_targets

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        change = dist.get_rank()
        text = (torch.arange(17) + index) % 256
        return (text[:-1] + change) % 256, (text[1:] + change * self.changes_targets) % 256


def refusals(pool: RankPool, folder: Path, strategy: ss.Strategy, *, changes_targets: bool) -> list[str]:
    """What each rank says to such data, or that nothing was refused."""
    data = Changing(changes_targets=changes_targets)
    ours = job(
        strategy=strategy, world_size=4, batch=ss.Batch(48, micro_batch=6), steps=1, data=lambda: (data, data)
    )
    return pool.run(lambda context: _refusal(ours, context), folder)


def _refusal(ours: ss.Job, context: RankContext) -> str:
    try:
        train(ours, context)
    except ss.DataError as error:
        return str(error)
    return "nothing was refused"
