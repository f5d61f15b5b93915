"""ZeRO-2 with uneven shards: flat buckets of gradients, of which a rank keeps only its own chunks.

As in ZeRO-1, the backward pass accumulates gradients in flat buckets, which are reduce-scattered as soon as they are
complete. But there are buffers for only two buckets. While one is reduced, the backward pass fills the other, and a
rank adds its chunk of the mean to its shard of the gradients, after every micro-batch. Gradients of later buckets
arrive early if modules are used in a different order from their registration; until their bucket has a buffer, they are
separate tensors, which `held` does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from shardscope.methods.strategies.flat_shards import bucket_buffers
from shardscope.methods.strategies.zero_1._torch import Zero1Rank
from shardscope.methods.strategies.zero_1._torch_flat import FlatBucket
from shardscope.training import clock
from shardscope.training.memory import Held


class FlatZero2Rank(Zero1Rank):
    """ZeRO-2 strategy in flat buckets."""

    keeps_gradients = False

    def wrap(self, model: nn.Module) -> nn.Module:
        super().wrap(model)
        num_bytes = [bucket.weights.nbytes for bucket in self.buckets]
        longest = max(num_bytes)
        self.buffers = [
            torch.empty(longest, dtype=torch.uint8, device=self.context.device)
            for _ in range(bucket_buffers(num_bytes) // longest)
        ]
        return model

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        held = super().held(optimizer)
        own = [bucket.own_grads for bucket in self.buckets]
        return {**held, "gradients": own, "buffers": [*held["buffers"], *self.buffers]}

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Return a context manager for the backward passes of all micro-batches but the last.

        Within this context, gradients are still reduced, because a rank keeps only its own shard of the gradients.
        """
        yield
        self._settle()
        self._begin_pass()

    def _clear(self) -> None:
        for bucket in self.buckets:
            bucket.own_grads.zero_()
        self._begin_pass()

    def _begin_pass(self) -> None:
        super()._begin_pass()
        self._open(0)

    def _open(self, number: int) -> None:
        """Let the backward pass fill a bucket as soon as the previous bucket in the same buffer has been reduced."""
        before = number - len(self.buffers)
        if before >= 0:
            with self.context.meter.waiting():
                self.sent[before].result()
        self.buckets[number].fill(self.buffers[number % len(self.buffers)])

    def _arrived(self, parameter: nn.Parameter) -> None:
        index, name = self.order[id(parameter)]
        self.missing[index].discard(name)
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            bucket = self.buckets[len(self.sent)]
            bucket.drop_gradients()
            self.context.meter.handed_over = clock.now()
            self.sent.append(self.sender.submit(partial(self._reduce, bucket)))
            if len(self.sent) < len(self.buckets):
                self._open(len(self.sent))

    def _reduce(self, bucket: FlatBucket) -> None:
        super()._reduce(bucket)
        bucket.own_grads.add_(bucket.own(bucket.grads))
