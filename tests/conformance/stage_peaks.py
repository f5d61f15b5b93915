"""Memory of a rank of a pipeline at the peak of a real step, as torch's CPU allocator records it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

import shardscope as ss
from conformance.allocator import allocated
from shardscope.training.context import RankContext
from shardscope.training.memory import Storages
from shardscope.training.trainer import Trainer


def measured(job: ss.Job) -> Callable[[RankContext], int]:
    """Bytes that a rank holds before a step, and those that the step allocates at its peak."""

    def run(context: RankContext) -> int:
        trainer = Trainer(job, context, context.events.path.parent)
        for step in (1, 2):
            trainer.take_step(step)
        strategy: Any = trainer.strategy
        rows = trainer._micro_batches(3)
        strategy.begin_step(trainer.optimizer, len(rows))  # gradients of the last step
        handed_on, received = _buffers(strategy.stages)
        held = Storages()
        for tensors in strategy.held(trainer.optimizer).values():
            held.add("states", tensors)
        held.add("messages", (info.buffer for info in received))
        held.add("batch", (tensor for pair in rows for tensor in pair))
        before = sum(held.sizes().values())
        gc.collect()

        def step() -> object:
            for info in handed_on:  # which the step replaces: the profiler must see both
                info.buffer = torch.empty_like(info.buffer)
            return strategy.step(rows, trainer.loss_function, trainer.optimizer)

        peak, _ = allocated(step)
        strategy.close()
        return before + peak

    return run


def _buffers(stages: dict[int, Any]) -> tuple[list[Any], list[Any]]:
    """The buffers of tensors that stages take from another stage of their rank, and those of received messages."""
    handed_on, received = list[Any](), list[Any]()
    for index, stage in stages.items():
        for before, infos in ((index - 1, stage.args_recv_info), (index + 1, stage.grad_recv_info)):
            taken: Iterator[Any] = chain.from_iterable(infos.values())
            (handed_on if before in stages else received).extend(
                info for info in taken if not info.is_root_arg and info.buffer is not None
            )
    return handed_on, received
