"""Data parallel over our own ring.

`DistributedDataParallel` fills buckets of gradients and hands each to a hook; the hook puts it on a queue, and one
thread a rank sends the buckets around the ring in that order while the backward pass goes on.
"""

# No postponed annotations here: DistributedDataParallel checks the types of a hook at run time.

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from shardscope.spec import strategy as spec
from shardscope.training.collectives.ring import Ring as RingCollective
from shardscope.training.strategies.all_reduce import AllReduce


class Ring(AllReduce):
    """Each bucket of gradients goes around the ring as soon as the backward pass has filled it."""

    name = "ring"

    def wrap(self, model: nn.Module) -> nn.Module:
        settings, group = self.job.strategy, self.context.group
        assert isinstance(settings, spec.Ring)
        assert group is not None
        on_chunk = self._trace if settings.trace_chunks else None
        self.ring = RingCollective(group, settings.directions, int(settings.slice_mb * 2**20), on_chunk)
        self.sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ring")
        self.bucket = 0
        module = super().wrap(model)
        self.ddp.register_comm_hook(None, self._exchange)
        return module

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
            return self.ring.all_reduce_(buffer)
        on_cpu = buffer.cpu()
        return buffer.copy_(self.ring.all_reduce_(on_cpu))

    def _trace(self, chunk: dict[str, Any]) -> None:
        self.context.events.emit("chunk", step=self.context.meter.step, bucket=self.bucket, **chunk)
