"""Base class of data-parallel strategies with their own all-reduce.

`DistributedDataParallel` fills buckets with gradients and passes each full bucket to a hook, which puts it into a
queue. On each rank, one thread reduces the buckets in the order of the queue while the backward pass continues.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardscope.training.memory import Held
from shardscope.training.strategies.base import Named
from shardscope.training.strategies.bucketed import BucketedRank


class OwnAllReduce(BucketedRank):
    """Data parallelism in which `reduce_` sums each gradient bucket as soon as the backward pass has filled it."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.prepare()
        module = super().wrap(model)
        if self.hook is None:
            self._register_hook()
        return module

    def take(self, named: Sequence[Named], roots: Sequence[nn.Module]) -> None:
        self.prepare()
        super().take(named, roots)

    def prepare(self) -> None:
        """Create the objects that `reduce_` needs from ``self.settings`` and ``self.context.group``."""

    @abstractmethod
    def reduce_(self, buffer: Tensor) -> Tensor:
        """Return the sum over all ranks of a flat CPU tensor: `buffer` itself, modified in place, or another tensor.

        Called from one thread, with the same buckets in the same order on every rank.
        """

    def work_space(self) -> list[Tensor]:
        """Return the buffers that `reduce_` keeps from call to call, so that their memory is counted."""
        return []

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        held = super().held(optimizer)
        return {**held, "buffers": [*held["buffers"], *self.work_space()]}
