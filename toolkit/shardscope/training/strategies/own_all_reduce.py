"""Base of data-parallel strategies with their own all-reduce.

`DistributedDataParallel` fills buckets of gradients and passes each to a hook, which puts it on a queue. One thread
per rank reduces the buckets in that order while the backward pass continues.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.training.memory import Held
from shardscope.training.strategies.bucketed import BucketedRank


class OwnAllReduce(BucketedRank):
    """Each bucket of gradients is reduced by `reduce_` as soon as the backward pass has filled it."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.prepare()
        module = super().wrap(model)
        if self.hook is None:
            self._take_over()
        return module

    def prepare(self) -> None:
        """Create the objects that `reduce_` needs from ``self.settings`` and ``self.context.group``."""

    @abstractmethod
    def reduce_(self, buffer: Tensor) -> Tensor:
        """Return the sum of a flat tensor in CPU memory over all ranks: in place, or as another tensor.

        One thread calls it, with the same buckets in the same order on all ranks.
        """

    def work_space(self) -> list[Tensor]:
        """The buffers that `reduce_` keeps from call to call."""
        return []

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        held = super().held(optimizer)
        return {**held, "buffers": [*held["buffers"], *self.work_space()]}

    def trace(self, chunk: dict[str, Any]) -> None:
        """Write one event about a message of the bucket in progress."""
        index = 0 if self.hook is None else self.hook.index
        self.context.events.emit("chunk", step=self.context.meter.step, bucket=index, **chunk)
