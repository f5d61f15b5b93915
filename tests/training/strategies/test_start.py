"""Every strategy starts from the same weights on all ranks, whatever a model draws them from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import job
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer


class Tied(nn.Sequential):
    """Weights of its own on every process, and one layer at both ends."""

    def __init__(self) -> None:
        middle = [nn.Linear(64, 64) for _ in range(3)]
        super().__init__(nn.Flatten(), *middle, middle[0])
        self.register_buffer("seen", torch.empty(1))
        for tensor in [*self.parameters(), *self.buffers()]:
            nn.init.constant_(tensor, float(os.getpid()))


@pytest.mark.parametrize("strategy", ["zero-1", "zero-3"])
def test_all_ranks_start_from_the_weights_of_rank_0(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    def values(context: RankContext) -> tuple[int, set[float]]:
        ours = job(model=Tied, data="digits", strategy=strategy, world_size=context.world_size)
        trainer = Trainer(ours, context, tmp_path)
        tensors = [*trainer.strategy.full_parameters().values(), *trainer.model.buffers()]
        return os.getpid(), {float(value) for tensor in tensors for value in tensor.unique()}

    rows = pool.run(values, tmp_path)
    assert [found for _, found in rows] == [{float(rows[0][0])}] * pool.world_size


def test_copies_of_a_tied_tensor_start_alike_in_a_pipeline(pool: RankPool, tmp_path: Path) -> None:
    def shared(context: RankContext) -> Any:
        ours = job(
            model=Tied, data="digits", strategy=ss.Pipeline(split="even"), world_size=context.world_size,
            batch=ss.Batch(48, micro_batch=6),
        )  # fmt: skip
        strategy = Trainer(ours, context, tmp_path).strategy
        return [strategy.names[name].unique().tolist() for name in strategy.rings]

    copies = [values for row in pool.run(shared, tmp_path) for values in row]
    assert len(copies) == 4  # weight and bias, at both ends
    assert all(values == copies[0] for values in copies)
