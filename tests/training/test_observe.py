"""Evaluating and saving change nothing that training goes on from, under every strategy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.alone import Never
from conformance.ranks import RankPool
from shardscope.training.context import RankContext
from shardscope.training.observe import unchanged
from shardscope.training.sharding import local
from shardscope.training.trainer import Trainer

EVERY = ss.Compression("local-sgd", every=3)
STRATEGIES: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"},
    "all-reduce": {"strategy": "all-reduce"},
    "tree": {"strategy": "tree"},
    "hierarchical": {"strategy": "hierarchical"},
    "zero-1": {"strategy": "zero-1"},
    "zero-2": {"strategy": "zero-2"},
    "zero-3": {"strategy": "zero-3"},
    "server": {"strategy": "parameter-server"},
    "dedicated servers": {"strategy": ss.ParameterServer(dedicated=True)},
    "gossip": {"strategy": "gossip"},
    "compressed gossip": {"strategy": "gossip", "compression": ss.Compression("topk", ratio=0.1)},
    "pipeline": {"strategy": ss.Pipeline(split="even")},
    "local SGD": {"strategy": "ring", "compression": EVERY},
    "local SGD over all-reduce": {"strategy": "all-reduce", "compression": EVERY},
}


ALSO = {3: ("zero-3", "gossip", "local SGD"), 4: ("hierarchical", "pipeline")}
"""At two ranks everything is tried."""


class Restless(nn.Module):
    """Draws random numbers and counts in every forward pass, in evaluations as in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.calls: Tensor

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        random.random()
        np.random.random()  # noqa: NPY002
        return values + 0.01 * torch.randn_like(values)


class Noisy(nn.Sequential):
    """A batch norm, dropout, and a part that stays in evaluation mode whatever the whole is set to."""

    def __init__(self) -> None:
        frozen = nn.BatchNorm1d(24)
        frozen.train = lambda mode=True: nn.Module.train(frozen, False)  # type: ignore[method-assign]
        super().__init__(
            nn.Flatten(), nn.Linear(64, 24), frozen, nn.ReLU(), nn.BatchNorm1d(24), nn.Dropout(0.2), Restless(),
            nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 10),
        )  # fmt: skip


class Layered(nn.Sequential):
    """The same for a pipeline, which takes no part that counts."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 24),
            nn.Tanh(), nn.Linear(24, 10),
        )  # fmt: skip


def job_of(case: str, world_size: int, **changes: Any) -> ss.Job:
    fields: dict[str, Any] = {
        "model": Layered if case == "pipeline" else Noisy, "data": "digits", "batch": 48, "steps": 7,
        "optimizer": "adamw",
        "world_size": world_size, "record": ss.Record(memory_first=0, memory_every=None), **STRATEGIES[case],
    }  # fmt: skip
    return ss.Job(**{**fields, **changes})


def train(job: ss.Job, context: RankContext, folder: Path, after: Path | None = None) -> list[Tensor]:
    """What this rank holds at the end: parameters, buffers, and what the next random numbers would be."""
    folder.mkdir(exist_ok=True)
    trainer = Trainer(job, context, folder)
    if after is not None:
        trainer.resume(after / "checkpoints")
    assert trainer.train(Never()) == "completed"
    return [
        *(local(p.detach()).clone() for p in trainer.model.parameters() if p.device.type != "meta"),
        *(b.clone() for b in trainer.model.buffers() if b.device.type != "meta"),
        torch.rand(1),
        torch.tensor([random.random(), np.random.random()]),  # noqa: NPY002
    ]


def assert_same(rows: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    for alone, other in rows:
        assert len(alone) == len(other)
        for number, (a, b) in enumerate(zip(alone, other, strict=True)):
            assert torch.equal(a, b), (number, float((a - b).norm() / a.norm()))


@pytest.mark.parametrize("case", STRATEGIES)
def test_a_job_that_is_looked_at_ends_at_the_same_bits(pool: RankPool, tmp_path: Path, case: str) -> None:
    if pool.world_size != 2 and case not in ALSO[pool.world_size]:
        pytest.skip("tried on two ranks")
    plain = job_of(case, pool.world_size)
    watched = plain.replace(eval_every=1, checkpoint=ss.Checkpoint(every=2))

    def body(context: RankContext) -> tuple[list[Tensor], list[Tensor]]:
        return train(plain, context, tmp_path / "plain"), train(watched, context, tmp_path / "watched")

    assert_same(pool.run(body, tmp_path))


@pytest.mark.parametrize("case", ["local SGD", "local SGD over all-reduce"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "until",
    [
        pytest.param(3, id="at an average", marks=pytest.mark.ranks(2)),
        pytest.param(5, id="between two", marks=pytest.mark.ranks(3)),
    ],
)
def test_a_resumed_local_sgd_run_ends_at_the_same_bits(
    pool: RankPool, tmp_path: Path, case: str, optimizer: str, until: int
) -> None:
    whole = job_of(case, pool.world_size, model="mlp", optimizer=optimizer, eval_every=2)

    def body(context: RankContext) -> tuple[list[Tensor], list[Tensor]]:
        alone = train(whole, context, tmp_path / "whole")
        train(whole.replace(until=until), context, tmp_path / "first")
        return alone, train(whole, context, tmp_path / "second", after=tmp_path / "first")

    assert_same([(a[:-2], b[:-2]) for a, b in pool.run(body, tmp_path)])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", [case for case in STRATEGIES if case != "pipeline"])
def test_what_is_evaluated_and_what_is_saved_have_the_first_workers_running_means(
    pool: RankPool, tmp_path: Path, case: str
) -> None:
    job = job_of(case, 3, steps=4, checkpoint=ss.Checkpoint(at_end=True))
    first = job.strategy.servers if getattr(job.strategy, "dedicated", False) else 0

    def body(context: RankContext) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        trainer = Trainer(job, context, tmp_path)
        trainer.train(Never())
        own = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
        with trainer.strategy.evaluating():
            seen = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
        then = job.replace(strategy="ring", compression="none") if "gossip" in case else job
        resumed = Trainer(then, context, tmp_path)  # gossip itself would go on from each rank's own
        resumed.resume(tmp_path / "checkpoints")
        return own, seen, dict(resumed.model.named_buffers())

    rows = pool.run(body, tmp_path)
    expected = rows[first][0]
    assert any(not torch.equal(expected[name], own[name]) for own, _, _ in rows for name in expected)
    for _, seen, saved in rows:
        assert all(
            torch.equal(seen[name], value) and torch.equal(saved[name], value)
            for name, value in expected.items()
        )


def test_whatever_a_module_does_while_it_is_looked_at_it_is_afterwards_as_it_was() -> None:
    module = Noisy()
    module[7].eval()
    before = _everything(module)
    with unchanged(module, {module[1].weight: torch.zeros(24, 64)}):
        assert not module[1].weight.any()
        module.train()
        module(torch.ones(4, 64))
        module[6].calls = torch.full((1,), 9.0)
    assert [p is q for p, q in zip(before[0], _everything(module)[0], strict=True)] == [True] * len(before[0])
    assert all(torch.equal(a, b) for a, b in zip(before[1], _everything(module)[1], strict=True))
    assert before[2] == _everything(module)[2]


def _everything(module: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    tensors = [*module.parameters(), *module.buffers()]
    modes = [part.training for part in module.modules()]
    state = [*modes, random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
    return tensors, [*(t.detach().clone() for t in tensors), torch.get_rng_state()], state


def test_an_evaluation_that_fails_puts_everything_back() -> None:
    module = Noisy()
    before = _everything(module)
    with pytest.raises(ZeroDivisionError), unchanged(module, {module[1].weight: torch.zeros(24, 64)}):
        module(torch.ones(4, 64))
        _ = 1 / 0
    after = _everything(module)
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert before[2] == after[2]
