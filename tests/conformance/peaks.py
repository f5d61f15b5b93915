"""Memory of real training steps as torch's own `MemTracker` sees it, beside what the formulas say."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

import shardscope as ss
from shardscope.analytic.memory import ModuleMemory, module_memory
from shardscope.spec.model import LayerTable, Model
from shardscope.training.context import RankContext
from shardscope.training.memory import Storages
from shardscope.training.models import build_model
from shardscope.training.sharding import local
from shardscope.training.strategies.fully_sharded import FullySharded
from shardscope.training.trainer import Trainer

CPU = torch.device("cpu")
DATA = {"gpt-nano": "python-source", "resnet": "digits"}
SAMPLES = {"gpt-nano": torch.zeros(2, 64, dtype=torch.int64), "resnet": torch.zeros(2, 1, 8, 8)}
TARGET_BYTES = {"gpt-nano": 64 * 8, "resnet": 8}
"""Of the targets of one sample: a token for each input, a class for each image."""
BATCH = 8
STAGES = {"single": 0, "all-reduce": 0, "zero-1": 1, "zero-2": 2, "zero-3": 3}
WARM_UP = 2
"""Steps after which optimizer state and buffers are there."""


class Measured(NamedTuple):
    """Bytes of one rank in a step."""

    parameters: int
    gradients: int
    optimizer: int
    work: int
    peak: int


def job_of(
    model: str, strategy: Any, world_size: int, optimizer: str, recompute: str = "none", batch: int = BATCH
) -> ss.Job:
    """So many samples on every rank."""
    return ss.Job(
        model=model, data=DATA[model], strategy=strategy, world_size=world_size, optimizer=optimizer,
        recompute=recompute, batch=batch * world_size,
    )  # fmt: skip


def tracked(job: ss.Job) -> Callable[[RankContext], Measured]:
    """A step on one rank under `MemTracker`, which is told of all that was there before.

    The ring is made to keep up: where it falls behind the backward pass, FSDP2's buffers live until they are sent,
    which is a matter of the machine's load and in no formula.
    """

    def run(context: RankContext) -> Measured:
        trainer = Trainer(job, context, context.events.path.parent)
        for step in range(1, 1 + WARM_UP):
            trainer.take_step(step)
        strategy, optimizer = trainer.strategy, trainer.optimizer
        if isinstance(strategy, FullySharded):
            _keep_up(strategy)
        rows, tracker, kinds = trainer._micro_batches(WARM_UP + 1), MemTracker(), Storages()
        tracker.track_external(
            *(local(t.detach()) for kind in strategy.held(optimizer).values() for t in kind)
        )
        tracker.track_external(*(tensor for pair in rows for tensor in pair))
        with tracker:
            strategy.step(rows, trainer.loss_function, optimizer)
        kinds.add_all(strategy.held(optimizer))
        sizes = kinds.sizes()
        strategy.close()
        held = [sizes.get(kind, 0) for kind in ("parameters", "gradients", "optimizer", "buffers")]
        return Measured(*held, int(tracker.get_tracker_snapshot("peak")[CPU]["Total"]))

    return run


def _keep_up(strategy: FullySharded) -> None:
    ring = strategy.ring
    assert ring is not None
    reduce_mean = ring.reduce_mean

    def at_once(unit: str, output: Tensor, buffer: Tensor) -> None:
        reduce_mean(unit, output, buffer)
        ring.finish()

    ring.reduce_mean = at_once  # type: ignore[method-assign]


@cache
def table_of(model: str) -> LayerTable:
    """Traced on two samples, whatever the batch, without what kernels take, which `MemTracker` does not see."""
    with patch("shardscope.training.cpu_scratch.scratch", lambda *_: ()):
        return Model.from_module(build_model(model), SAMPLES[model], name=model, memory=True)


def predicted(job: ss.Job, rank: int = 0) -> ModuleMemory:
    """The same step by formula."""
    model = str(job.model)
    return module_memory(
        table_of(model), batch=job.batch.per_rank(job.world_size), optimizer=job.optimizer,
        data_bytes=SAMPLES[model].nbytes / len(SAMPLES[model]) + TARGET_BYTES[model], recompute=job.recompute,
        zero_stage=STAGES[job.strategy.name], data_parallel=job.world_size, rank=rank,
        bucket_mb=getattr(job.strategy, "bucket_mb", 25.0),
    )  # fmt: skip
