"""The pattern of data-parallel strategies with an all-reduce of our own.

`DistributedDataParallel` fills buckets of gradients and hands each to a hook; the hook puts it on a queue, and one
thread a rank reduces the buckets in that order while the backward pass goes on.
"""

# No postponed annotations here: DistributedDataParallel checks the types of a hook at run time.

import time
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from shardscope.training.memory import Held
from shardscope.training.strategies.all_reduce import AllReduce


class OwnAllReduce(AllReduce):
    """Each bucket of gradients is reduced by `reduce_` as soon as the backward pass has filled it."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.prepare()
        self.sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self.name)
        self.bucket = 0
        module = super().wrap(model)
        self.ddp.register_comm_hook(None, self._exchange)
        return module

    @abstractmethod
    def prepare(self) -> None:
        """Make what `reduce_` needs, out of ``self.job.strategy`` and ``self.context.group``."""

    @abstractmethod
    def reduce_(self, buffer: Tensor) -> Tensor:
        """Sum a flat tensor in CPU memory over all ranks, in place; called by one thread, in the same order on all."""

    def work_space(self) -> list[Tensor]:
        """The buffers that `reduce_` keeps from call to call."""
        return []

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        held = super().held(optimizer)
        return {**held, "buffers": [*held["buffers"], *self.work_space()]}

    def close(self) -> None:
        self.sender.shutdown()

    def _exchange(self, _: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        buffer, index = bucket.buffer(), bucket.index()
        self.context.meter.handed_over = time.time()

        def send() -> None:
            self.bucket = index
            try:
                done.set_result(self._mean(buffer))
            except Exception as error:
                done.set_exception(error)  # type: ignore[arg-type]  # the stub asks for a result

        self.sender.submit(send)
        return done

    def _mean(self, buffer: Tensor) -> Tensor:
        buffer.div_(self.context.world_size)
        if not self.context.staged:
            return self.reduce_(buffer)
        return buffer.copy_(self.reduce_(buffer.cpu()))

    def trace(self, chunk: dict[str, Any]) -> None:
        """Write one event about a message of the bucket under way."""
        self.context.events.emit("chunk", step=self.context.meter.step, bucket=self.bucket, **chunk)
