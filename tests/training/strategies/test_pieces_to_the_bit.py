"""A run in pieces has, in the first step of each piece, the buckets that it would have had in one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.ranks import RankPool
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer
from training.test_pieces import job_of, train

OPTIMIZERS = {
    "sgd": ss.Optimizer("sgd", lr=0.05, momentum=0.9),
    "adamw": ss.Optimizer("adamw", lr=1e-2),
    "lamb": ss.Optimizer("lamb", lr=1e-2),
    "lars": ss.Optimizer("lars", lr=0.5),
}


class Reversed(nn.Module):
    """Layers registered from last to first, so that buckets change much once gradients have come."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 10)
        self.norm = nn.BatchNorm1d(24)
        self.body = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.stem = nn.Linear(64, 24)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.stem(x.flatten(1)).relu()
        for layer in reversed(self.body):
            x = nn.functional.dropout(layer(x).relu(), 0.1, self.training)
        return self.head(self.norm(x))


STRATEGIES = {
    "ring": (ss.Ring(bucket_mb=0.003), 1),
    "ring:2": (ss.Ring(directions=2, bucket_mb=0.003), 2),
    "all-reduce": (ss.AllReduce(bucket_mb=0.003), 1),
}
"""With the micro-batches in which each rank takes its share of a batch."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_in_pieces_ends_at_the_bits_of_one(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    settings, accumulation = STRATEGIES[strategy]
    batch = ss.Batch(24 * pool.world_size, micro_batch=24 // accumulation)
    jobs = {
        name: job_of(
            model=Reversed, strategy=settings, world_size=pool.world_size, optimizer=optimizer,
            batch=batch, steps=6, clip_norm=1.0,
        )
        for name, optimizer in OPTIMIZERS.items()
    }  # fmt: skip

    def body(context: RankContext) -> dict[str, list[list[Tensor]]]:
        found = {}
        for number, (name, job) in enumerate(jobs.items(), start=1):
            whole = train(job, context, tmp_path / f"{name}-whole")
            train(job.replace(until=number), context, tmp_path / f"{name}-0")
            last = train(job, context, tmp_path / f"{name}-1", tmp_path / f"{name}-0")
            found[name] = [[t.clone() for t in run.model.state_dict().values()] for run in (whole, last)]
        return found

    for ranks in pool.run(body, tmp_path):
        for name, (whole, pieces) in ranks.items():
            equal = [torch.equal(a, b) for a, b in zip(whole, pieces, strict=True)]
            assert all(equal), f"{strategy} with {name}"


def test_to_follow_an_order_leaves_the_model_as_it_was(pool: RankPool, tmp_path: Path) -> None:
    job = job_of(model=Reversed, world_size=pool.world_size, batch=24 * pool.world_size, steps=4)

    def body(context: RankContext) -> tuple[list[Tensor], list[Tensor], Any]:
        (tmp_path / "a").mkdir(exist_ok=True)
        trainer = Trainer(job, context, tmp_path / "a")
        before = [t.clone() for t in trainer.model.state_dict().values()]
        names = [name for name, _ in trainer.model.named_parameters()]
        trainer.strategy.follow_order(names)
        after = [t.clone() for t in trainer.model.state_dict().values()]
        leftover = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        trainer.strategy.close()
        return before, after, (trainer.model.seen, leftover, trainer.strategy.gradient_order == names)

    for before, after, left in pool.run(body, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert left == (0, [], True)


class Locked(Reversed):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize("model", [Reversed, Locked])
def test_to_rehearse_for_a_compressor_leaves_the_model_as_it_was(
    pool: RankPool, tmp_path: Path, model: type[Reversed]
) -> None:
    job = job_of(
        model=model, world_size=pool.world_size, batch=24 * pool.world_size,
        compression=ss.Compression("topk", ratio=0.1),
    )  # fmt: skip

    def body(context: RankContext) -> list[int]:
        (tmp_path / "a").mkdir(exist_ok=True)
        trainer = Trainer(job, context, tmp_path / "a")
        trainer.strategy.close()
        grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        found = trainer.model.seen, trainer.model.norm.num_batches_tracked, len(grads)
        return [*map(int, found), len(trainer.strategy.gradient_order)]

    num_parameters = len(list(Reversed().parameters()))
    assert pool.run(body, tmp_path) == [[0, 0, 0, num_parameters]] * pool.world_size
