"""Evaluation where there is little to evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.alone import trainer_in
from conformance.ranks import RankPool
from conformance.strategy import job
from shardscope.runlog.writer import EventWriter
from shardscope.training import loss
from shardscope.training.context import RankContext
from shardscope.training.evaluate import evaluate
from shardscope.training.meter import Meter
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


class Neighbours(nn.Module):
    """A graph network's step over a sparse adjacency matrix, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("adjacency", torch.eye(10).to_sparse(), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.adjacency, self.head(images.flatten(1)).t()).t()


def test_a_model_with_a_sparse_buffer_can_be_evaluated(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "rank-0.jsonl", 0) as events:
        alone = RankContext(0, 1, torch.device("cpu"), Meter(), events)
        ours = job(model=Neighbours, data=one_test_row, strategy="single", world_size=1)
        trainer = Trainer(ours, alone, tmp_path)
        found = evaluate(trainer.strategy, trainer.data.test, trainer.loss_function, trainer._place)
    assert found["samples"] == 1
    assert not trainer.strategy.consensus()  # nobody to agree with, so nothing is copied


class Judging(nn.Module):
    """Computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(images.flatten(1))
        return {
            "logits": scores,
            "loss": nn.functional.cross_entropy(scores, scores.new_zeros(len(scores)).long()),
        }


def many_test_rows() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    (images, classes), _ = one_test_row()
    return (images, classes), (images, classes)


def test_what_a_models_own_loss_scores_is_looked_for_once_and_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    few_at_a_time = loss._few_at_a_time

    def watched(scores: torch.Tensor, target: torch.Tensor) -> Any:
        for part, classes in few_at_a_time(scores, target):
            copied.append(len(part))
            yield part, classes

    monkeypatch.setattr(loss, "_CHUNK_LOGITS", 20)  # two rows of ten classes
    monkeypatch.setattr(loss, "_few_at_a_time", watched)
    with EventWriter(tmp_path / "rank-0.jsonl", 0) as events:
        alone = RankContext(0, 1, torch.device("cpu"), Meter(), events)
        ours = job(
            model=Judging,
            data=many_test_rows,
            strategy="single",
            world_size=1,
            batch=ss.Batch(8, micro_batch=4),
        )
        trainer = Trainer(ours, alone, tmp_path)
        found = evaluate(trainer.strategy, trainer.data.test, trainer.loss_function, trainer._place)
    assert found["samples"] == 24  # half of the test rows
    assert found["accuracy"] in (0.0, 1.0)  # all rows are the same
    assert copied == [2, 2]


class Tagging(nn.Module):
    """Scores six classes at each of four places."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 6)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(rows)


def first_rows_without_targets() -> tuple[
    tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]:
    """Targets of which the first test row has none that counts, and the second only one, at its first place."""
    numbers = torch.Generator().manual_seed(0)
    rows = torch.randn(48, 4, 16, generator=numbers)
    tags = torch.randint(6, (48, 4), generator=numbers)
    tags[0] = tags[1, 1:] = -100
    return (rows, tags.clamp(min=0)), (rows, tags)


def flat_sum(output: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), tags.flatten(), reduction="sum")


flat_sum.reduction = "sum"  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss_function", ["cross-entropy", flat_sum], ids=["named", "own sum"])
def test_it_does_not_depend_on_how_rows_without_targets_are_cut(tmp_path: Path, loss_function: Any) -> None:
    found = []
    for micro_batch in (1, 2, 24):
        trainer = trainer_in(
            tmp_path / str(micro_batch), model=Tagging, data=first_rows_without_targets, loss=loss_function,
            batch=ss.Batch(24, micro_batch=micro_batch),
        )  # fmt: skip
        with trainer.context.events:
            result = evaluate(trainer.strategy, trainer.data.test, trainer.loss_function, trainer._place)
        found.append((result["accuracy"], pytest.approx(result["loss"], rel=1e-6)))
    assert found[0][0] is not None
    assert found == [found[-1]] * 3
