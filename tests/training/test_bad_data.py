"""Data that are not finite are named, and the learning rate is not blamed for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from shardscope.runlog.writer import EventWriter
from shardscope.training.context import RankContext
from shardscope.training.data import GlobalSampler
from shardscope.training.meter import Meter
from shardscope.training.trainer import Trainer, TrainingError

ROW = 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layer(x) * scale


def rows(value: float, where: str) -> Any:
    x, scale, y = torch.ones(60, 4), torch.ones(60, 1), torch.zeros(60, 3)
    {"x": x, "scale": scale, "y": y}[where][ROW, -1] = value
    split = ({"x": x, "scale": scale}, y)
    return split, split


@pytest.mark.parametrize(
    ("where", "name"), [("x", r"inputs\['x'\]"), ("scale", r"inputs\['scale'\]"), ("y", "targets")]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_row_that_is_not_finite_is_named(tmp_path: Path, where: str, name: str, value: float) -> None:
    sampler = GlobalSampler(60, 12, seed=0)
    step = next(step for step in range(5) if ROW in sampler.indices(step)) + 1
    words = f"in step {step} because row {ROW} of the training split has a NaN or an infinity in {name}"
    with pytest.raises(TrainingError, match=words):
        steps(tmp_path, lambda: rows(value, where), lr=0.01)


def test_a_learning_rate_that_is_too_high_is_still_blamed(tmp_path: Path) -> None:
    def wide() -> Any:
        return {"x": torch.ones(60, 4), "scale": torch.ones(60, 1)}, 1e3 * torch.ones(60, 3)

    with pytest.raises(TrainingError, match="with learning rate 1e"):
        steps(tmp_path, wide, lr=1e30)


def steps(folder: Path, data: Any, *, lr: float) -> None:
    """Five steps on one process."""
    job = ss.Job(
        model=Model, data=data, loss="mse", strategy="single", batch=ss.Batch(12, micro_batch=4), steps=5,
        optimizer=ss.Optimizer("sgd", lr=lr),
    )  # fmt: skip
    with EventWriter(folder / "rank-0.jsonl", 0) as events:
        trainer = Trainer(job, RankContext(0, 1, torch.device("cpu"), Meter(), events), folder)
        for step in range(1, 6):
            trainer.take_step(step)
