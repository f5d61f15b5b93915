"""Evaluation where there is little to evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankPool
from conformance.strategy import job
from shardscope.training.context import RankContext
from shardscope.training.evaluate import evaluate
from shardscope.training.trainer import Trainer


class Reshaping(nn.Module):
    """Cannot take a batch of no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.reshape(images.shape[0], -1))


def one_test_row() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    images, classes = torch.ones(48, 8, 8), torch.zeros(48, dtype=torch.int64)
    return (images, classes), (images[:1], classes[:1])


@pytest.mark.parametrize("strategy", ["ring", "zero-3"])
def test_a_test_split_may_have_fewer_rows_than_there_are_ranks(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    def result(context: RankContext) -> dict[str, Any]:
        ours = job(model=Reshaping, data=one_test_row, strategy=strategy, world_size=context.world_size)
        trainer = Trainer(ours, context, tmp_path)
        found = evaluate(trainer.strategy, trainer.data.test, trainer.loss_function, trainer._place)
        trainer.strategy.close()
        return found

    first, *others = pool.run(result, tmp_path)
    assert first["samples"] == 1
    assert others == [first] * (pool.world_size - 1)
