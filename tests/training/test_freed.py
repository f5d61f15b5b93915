"""A trainer leaves nothing in its process once it has trained: no model, no strategy, no open file."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from conformance.alone import Never
from conformance.ranks import RankPool
from conformance.runs import SHORT_TEXT, open_files
from conformance.strategy import job
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.context import RankContext
from shardscope.training.models import build_model
from shardscope.training.trainer import Trainer


def mesh(data: Any = "ring", **settings: Any) -> ss.Strategy:
    return ss.Strategy("mesh", data=data, **settings)


def experts() -> Any:
    mixture = RoutedMixture(experts=4, active=2, ffn=8)
    return build_model(GPTConfig(layers=1, hidden=16, heads=2, vocab=256, seq=16, ffn=32, mixture=mixture))


OF_TWO: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "all-reduce, compressed": {"strategy": "all-reduce", "compression": "int8"},
    "ring": {},
    "ring, compressed": {"strategy": "ring", "compression": "powersgd"},
    "tree": {},
    "zero-1": {},
    "zero-2": {},
    "zero-3": {},
    "zero-3, compressed": {"strategy": "zero-3", "compression": "int8"},
    "zero-3:backend": {},
    "pipeline": {},
    "gossip": {},
    "parameter-server": {},
    "tensor": {"strategy": mesh(tensor=2)},
    "context": {"strategy": mesh(context=2)},
    "expert": {"strategy": mesh(expert=2), "model": experts},
}
OF_FOUR: dict[str, dict[str, Any]] = {
    "hierarchical": {"strategy": ss.Hierarchical(per_node=2)},
    "replicas of shards": {"strategy": ss.Zero3(replicas=2)},
    "tensor": {"strategy": mesh("all-reduce", tensor=2)},
    "shards beside tensor": {"strategy": mesh("zero-3", tensor=2, sequence_parallel=True)},
    "stages of zero-1": {"strategy": mesh("zero-1", pipeline=2)},
    "stages of zero-3": {"strategy": mesh("zero-3", pipeline=2)},
    "stages beside context": {"strategy": mesh(pipeline=2, context=2, context_comm="ring")},
    "experts of zero-3": {"strategy": mesh("zero-3", expert=2), "model": experts},
}


def jobs(cases: dict[str, dict[str, Any]], world_size: int) -> dict[str, ss.Job]:
    fields: dict[str, Any] = {
        "world_size": world_size, "steps": 2, "batch": ss.Batch(16, micro_batch=2), "recompute": "selective",
        "precision": "fp32", "eval_every": None, "data": SHORT_TEXT,
    }  # fmt: skip
    return {name: job(**{"strategy": name, **fields, **changes}) for name, changes in cases.items()}


def parts(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """What holds the memory of a trainer."""
    yield "strategy", trainer.strategy
    yield "model", trainer.model
    yield "optimizer", trainer.optimizer
    yield from ((f"parameter {name}", each) for name, each in trainer.model.named_parameters())


def trained(ours: ss.Job, context: RankContext) -> Callable[[], list[str]]:
    """Train a job; return a function that names what is still in memory."""
    trainer = Trainer(ours, context, context.events.path.parent)
    kept = [(name, weakref.ref(each)) for name, each in parts(trainer)]
    assert trainer.train(Never()) == "completed"
    return lambda: [name for name, reference in kept if reference() is not None]


def left_by(every: dict[str, ss.Job], context: RankContext) -> dict[str, Any]:
    """What each job leaves behind: parts of its trainer, and files that its second run has opened."""
    found = {}
    for name, ours in every.items():
        trained(ours, context)  # opens the groups of its axes, which later jobs use too
        gc.collect()
        before = open_files()
        left = trained(ours, context)
        gc.collect()
        found[name] = left(), open_files() - before
    return found


FEW = ("ring", "zero-1", "zero-3", "pipeline", "shards beside tensor")
"""Of each kind one, for the slow tier."""


@pytest.mark.slow
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("all_cases", [False, pytest.param(True, marks=pytest.mark.weekly)])
def test_a_trainer_is_freed_once_it_has_trained(pool: RankPool, tmp_path: Path, all_cases: bool) -> None:
    cases = OF_TWO if pool.world_size == 2 else OF_FOUR
    every = jobs({name: each for name, each in cases.items() if all_cases or name in FEW}, pool.world_size)
    for found in pool.run(partial(left_by, every), tmp_path):
        assert {name: left for name, left in found.items() if left != ([], 0)} == {}
