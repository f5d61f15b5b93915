"""ZeRO-2 and ZeRO-3 on parameters without rows to cut, and on blocks whose output is changed in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import OPTIMIZERS, job, relative_difference, train
from shardscope.runlog.writer import EventWriter
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.trainer import Trainer

STAGES = ["zero-2", "zero-3"]


def odd_job(
    model: Callable[[], nn.Module], strategy: Any, world_size: int, parts: int = 1, **changes: Any
) -> ss.Job:
    fields = {"optimizer": "adamw", "steps": 4, "data": "digits", **changes}
    batch = ss.Batch(48, micro_batch=48 // world_size // parts)
    return job(model=model, strategy=strategy, world_size=world_size, batch=batch, **fields)


def follow(
    pool: RankPool, folder: Path, model: Callable[[], nn.Module], strategy: Any, **changes: Any
) -> None:
    parts = changes.pop("parts", 1)
    ranks = pool.run(lambda c: train(odd_job(model, strategy, c.world_size, parts, **changes), c)[1], folder)
    with EventWriter(folder / "alone.jsonl", 0) as events:
        alone = RankContext(0, 1, torch.device("cpu"), Meter(), events)
        expected = train(odd_job(model, "single", 1, 1, **changes), alone)[1]
    for parameters in ranks:
        assert relative_difference(parameters, expected) < 1e-9


class Numbers(nn.Module):
    """Single numbers in a block and outside, one of them late, and tensors of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 12), nn.Linear(12, 10)
        self.block = nn.Linear(12, 12)
        self.block.gain = nn.Parameter(torch.tensor(0.7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.unused = nn.Parameter(torch.tensor(3.0))
        self.no_rows, self.no_columns = nn.Parameter(torch.zeros(0, 5)), nn.Parameter(torch.zeros(5, 0))

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.stem(images.flatten(1)))
        x = x + torch.tanh(self.block(x)) * self.block.gain * self.frozen
        return self.head(x) * self.scale + self.no_rows.sum() + self.no_columns.sum()


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("stage", [*STAGES, "zero-3:backend"])
def test_numbers_and_empty_tensors_follow_one_process(
    pool: RankPool, tmp_path: Path, stage: str, optimizer: str
) -> None:
    changes = {"optimizer": OPTIMIZERS[optimizer], "clip_norm": 0.5}
    follow(pool, tmp_path, Numbers, stage, parts=2, **changes)


@pytest.mark.ranks(4)  # two replicas of two shards are four ranks
@pytest.mark.parametrize("strategy", [ss.Zero3(replicas=2), ss.Zero2(offload=True)], ids=lambda s: s.label)
def test_numbers_follow_one_process_with_replicas_and_offloading(
    pool: RankPool, tmp_path: Path, strategy: Any
) -> None:
    follow(pool, tmp_path, Numbers, strategy, clip_norm=0.5)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", ["zero-3", "ring"])
def test_numbers_survive_a_checkpoint_and_a_change_of_strategy(
    pool: RankPool, tmp_path: Path, first: str
) -> None:
    class Used(Numbers):
        def __init__(self) -> None:
            super().__init__()
            del self.unused  # the ring needs a gradient of each

    def body(context: RankContext) -> float:
        ours = odd_job(Used, first, 2, checkpoint=ss.Checkpoint(every=2))
        whole = train(ours, context)[1]
        trainer = Trainer(ours.replace(steps=2), context, tmp_path)
        trainer.take_step(1)
        trainer.take_step(2)
        trainer._save(2)
        trainer.strategy.close()
        then = Trainer(ours.replace(strategy="zero-2"), context, tmp_path)
        then.resume(tmp_path / "checkpoints")
        for step in (3, 4):
            then.take_step(step)
        resumed = {name: p.detach().double().clone() for name, p in then.strategy.full_parameters().items()}
        then.strategy.close()
        return relative_difference(resumed, whole)

    assert max(pool.run(body, tmp_path)) < 1e-9


# Outputs that are views.


class Split(nn.Module):
    """Returns a view of its own result, another in a tuple, and one of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.linear(x)
        return y.view(-1, 3, 4), {"half": self.linear(torch.tanh(y))[:, :6], "input": x.view(-1, 4, 3)}


class InPlace(nn.Module):
    """Changes what its blocks return in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 12), nn.Linear(12, 10)
        self.blocks = nn.ModuleList([Split(), Split()])

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.stem(images.flatten(1)))
        for block in self.blocks:
            y, more = block(x)
            y += x.view(-1, 3, 4)
            more["half"] *= 2
            x = torch.tanh(y.flatten(1) + more["half"].repeat(1, 2) + more["input"].flatten(1))
        return self.head(x)


class OutOfPlace(InPlace):
    """The same, without."""

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.stem(images.flatten(1)))
        for block in self.blocks:
            y, more = block(x)
            y = y + x.view(-1, 3, 4)
            x = torch.tanh(y.flatten(1) + 2 * more["half"].repeat(1, 2) + more["input"].flatten(1))
        return self.head(x)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_views_that_are_changed_in_place_follow_one_process(
    pool: RankPool, tmp_path: Path, stage: str, parts: int
) -> None:
    follow(pool, tmp_path, InPlace, stage, parts=parts)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_views_cost_no_further_collective(pool: RankPool, tmp_path: Path) -> None:
    def calls(context: RankContext, model: Callable[[], nn.Module]) -> dict[str, int]:
        trainer = Trainer(odd_job(model, "zero-3", context.world_size), context, tmp_path)
        trainer.context.meter.step = 1
        trainer.strategy.step(trainer._micro_batches(1), trainer.loss_function, trainer.optimizer)
        trainer.strategy.close()
        return {name: row["calls"] for name, row in context.meter.drain()[0].items()}

    for changed, plain in pool.run(lambda c: (calls(c, InPlace), calls(c, OutOfPlace)), tmp_path):
        assert changed == plain
        assert plain["ring_all_gather"] == 2 * 3  # each block and the outermost, forward and backward
