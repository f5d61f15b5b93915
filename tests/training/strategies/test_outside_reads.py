"""ZeRO-2 and ZeRO-3 train models that read a block's parameters outside the block's own forward pass."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import relative_difference, train
from shardscope.runlog.writer import EventWriter
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.observe import random_state_kept
from shardscope.training.strategies._outside_reads import read_outside
from shardscope.training.trainer import Trainer
from shardscope.training.twin import twin_of
from training.test_pieces import train as train_pieces


class Base(nn.Module):
    """A stem, three blocks and a head; subclasses read their weights where they should not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 10)
        self.passes = 0

    def run(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = self.stem(x.flatten(1).to(self.stem.weight.dtype))
        for block in self.blocks:
            x = block(x).tanh()
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(x))


class ReadsALateBlockFirst(Base):
    def forward(self, x: Tensor) -> Tensor:
        shift = self.blocks[2].bias.mean()
        return self.head(self.run(x) + shift)


class ReadsABlockAgain(Base):
    """Its own forward pass is over when the last layer uses its weight once more."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(linear(self.run(x), self.blocks[1].weight.t()))


class Penalised(Base):
    """Adds a share of the norm of every block to the outputs, between the passes through the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        for block in self.blocks:
            x = x + 0.1 * block.weight.square().sum()
        return self.head(x)


class TiedByCall(nn.Module):
    """Direct children only: the decoder reads the encoder's weight, and its own bias, and never calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 12)
        self.decoder = nn.Linear(12, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x.flatten(1)).tanh()
        return self.head(linear(code, self.encoder.weight.t() + self.decoder.weight, self.decoder.bias))


class BlockThatReadsAnother(nn.Module):
    """Each block holds its neighbour in a list, so that it is no submodule, and adds its weight to its own."""

    class Block(nn.Module):
        def __init__(self, others: list[nn.Linear]) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.others = list(others)

        def forward(self, x: Tensor) -> Tensor:
            return sum((linear(x, other.weight) for other in self.others), self.layer(x)).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Block([])
        self.second = self.Block([self.first.layer])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x.flatten(1))))


MODELS: list[Callable[[], nn.Module]] = [
    ReadsALateBlockFirst, ReadsABlockAgain, Penalised, TiedByCall, BlockThatReadsAnother,
]  # fmt: skip


def digits(model: Callable[[], nn.Module], **changes: object) -> ss.Job:
    fields = {
        "model": model,
        "data": "digits",
        "batch": 48,
        "steps": 4,
        "precision": "fp64",
        "optimizer": "adamw",
    }
    return ss.Job(**{**fields, **changes})


def alone(model: Callable[[], nn.Module], folder: Path) -> dict[str, Tensor]:
    with EventWriter(folder / "alone.jsonl", 0) as events:
        context = RankContext(0, 1, torch.device("cpu"), Meter(), events)
        return train(digits(model, strategy="single"), context)[1]


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3"])
def test_such_models_end_where_one_process_does(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    models = MODELS if pool.world_size == 2 else [Penalised]
    batch = ss.Batch(48, micro_batch=48 // pool.world_size // 2)
    jobs = [digits(model, strategy=strategy, world_size=pool.world_size, batch=batch) for model in models]

    def body(context: RankContext) -> list[dict[str, Tensor]]:
        return [train(job, context)[1] for job in jobs]

    expected = [alone(model, tmp_path) for model in models]
    for found in pool.run(body, tmp_path):
        for model, ours, theirs in zip(models, found, expected, strict=True):
            assert relative_difference(ours, theirs) < 1e-9, model


class Counting(ReadsABlockAgain):
    """Changes itself in every pass: a counter, a list, a buffer, and random numbers drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm, self.norms = nn.BatchNorm1d(64), []

    def forward(self, x: Tensor) -> Tensor:
        self.norms.append(float(x.norm()) + random.random() + np.random.rand())  # noqa: NPY002
        x = nn.functional.dropout(self.batch_norm(x.flatten(1)), 0.5, self.training)
        return super().forward(x)


def test_looking_for_reads_leaves_model_and_random_numbers_as_they_were() -> None:
    model = Counting()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    twin = twin_of(model)
    assert twin is not None
    with random_state_kept():
        found = read_outside(
            twin, ["stem", "blocks.0", "blocks.1", "head"], lambda m: m(torch.randn(4, 1, 8, 8))
        )
    assert found == {"blocks.1"}
    assert (model.passes, model.norms, twin.passes) == (0, [], 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert drawn[0] == random.getstate()
    assert torch.equal(drawn[1], torch.get_rng_state())
    assert drawn[2] == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True))


class ReadsOnlyInEvaluation(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        return self.head(x if self.training else linear(x, self.blocks[1].weight))


class HoldsALock(ReadsABlockAgain):
    """Cannot be copied, so that nothing can be found out beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("model", [ReadsOnlyInEvaluation, HoldsALock])
def test_a_read_that_could_not_be_foreseen_is_refused_in_words(
    pool: RankPool, tmp_path: Path, model: Callable[[], nn.Module]
) -> None:
    job = digits(model, strategy="zero-3", world_size=2)

    def body(context: RankContext) -> str:
        trainer = Trainer(job, context, tmp_path)
        try:
            trainer.take_step(1)
            with trainer.strategy.evaluating() as predict:
                predict(torch.ones(2, 1, 8, 8, dtype=torch.float64))
        except ss.SpecError as error:
            return str(error)
        finally:
            trainer.strategy.close()
        return ""

    for words in pool.run(body, tmp_path):
        assert "reads a block's parameter outside the block's forward pass" in words
        assert "strategy='zero-1'" in words


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("first", "then"), [("zero-3", "ring"), ("ring", "zero-3"), ("zero-3", "zero-2")])
def test_what_compression_owes_such_blocks_goes_on_under_another_strategy(
    pool: RankPool, tmp_path: Path, first: str, then: str
) -> None:
    topk = ss.Compression("topk", ratio=0.1)
    job = digits(ReadsABlockAgain, strategy=then, world_size=2, compression=topk, steps=3, precision="fp32")

    def body(context: RankContext) -> tuple[float, float]:
        before = train_pieces(job.replace(strategy=first, until=2), context, tmp_path / "0")
        (tmp_path / "1").mkdir(exist_ok=True)
        after = Trainer(job, context, tmp_path / "1")
        after.resume(tmp_path / "0" / "checkpoints")
        sums = [
            sum(float(t.sum()) for t in run.strategy.compressor_state().values()) for run in (before, after)
        ]
        after.strategy.close()
        return sums[0], sums[1]

    ranks = pool.run(body, tmp_path)
    owed, owes = (sum(column) for column in zip(*ranks, strict=True))
    assert owes == pytest.approx(owed, rel=1e-4)
    assert owed != 0


class KeptInAList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.blocks[1].weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(linear(self.run(x), self.kept[0]))


class KeptInAClosure(Base):
    def __init__(self) -> None:
        super().__init__()
        weight = self.head.weight
        self.last = lambda x: linear(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(x))


class KeptAndNotUsed(KeptInAList):
    def forward(self, x: Tensor) -> Tensor:
        return Base.forward(self, x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["zero-2", "zero-3"])
def test_a_reference_that_would_keep_its_first_values_is_refused(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    def body(context: RankContext) -> list[str]:
        said = []
        for model in (KeptInAList, KeptInAClosure, KeptAndNotUsed):
            trainer = Trainer(
                digits(model, strategy=strategy, world_size=2), context, tmp_path / model.__name__
            )
            try:
                trainer.take_step(1)
                said.append("trained")
            except ss.SpecError as error:
                said.append(str(error))
            finally:
                trainer.strategy.close()
        return said

    for listed, enclosed, unused in pool.run(body, tmp_path):
        assert "uses its parameter 'blocks.1.weight' through a reference outside its module" in listed
        assert "uses its parameter 'head.weight' through a reference outside its module" in enclosed
        assert unused == "trained"
