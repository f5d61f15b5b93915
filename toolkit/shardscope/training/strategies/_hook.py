"""Communication hook for `DistributedDataParallel`'s buckets: one thread per rank exchanges them in order."""

# No postponed annotations here: DistributedDataParallel checks the types of a hook at run time.

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardscope.training import clock
from shardscope.training.collectives.sender import Sender
from shardscope.training.compression import Bucket
from shardscope.training.context import RankContext


class BucketHook:
    """Passes every bucket to `exchange_` on a separate thread, while the backward pass continues.

    Args:
        ddp: The module that fills the buckets.
        context: This rank's context.
        exchange_: Replaces a flat tensor in CPU memory by its mean over all ranks, in place.
    """

    def __init__(
        self, ddp: DistributedDataParallel, context: RankContext, exchange_: Callable[[Bucket], None]
    ) -> None:
        self.context, self.exchange_ = context, exchange_
        self.index = 0
        """Index of the bucket in progress."""
        self.is_idle = False
        """Whether buckets are returned unchanged."""
        self._names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._sender = Sender("buckets")
        ddp.register_comm_hook(None, self._exchange)

    def close(self) -> None:
        """End the thread."""
        self._sender.close()

    def finish(self) -> None:
        """Raise the error of the first bucket that failed; called after a backward pass, when all have returned."""
        if self._sender.failure is not None:
            raise self._sender.failure

    def _exchange(self, _: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        buffer, index, parameters = bucket.buffer(), bucket.index(), bucket.parameters()
        self.context.meter.handed_over = clock.now()
        if self.is_idle:
            done.set_result(buffer)
            return done

        def send() -> None:
            self.index = index
            self._mean(buffer, parameters)

        # also after a failure: DistributedDataParallel would only report a non-tensor; `finish` raises the real error
        self._sender.submit(send).add_done_callback(lambda _: done.set_result(buffer))
        return done

    def _mean(self, buffer: Tensor, parameters: list[Tensor]) -> None:
        flat = buffer.cpu() if self.context.staged else buffer
        names = [self._names[id(parameter)] for parameter in parameters]
        self.exchange_(Bucket(names, [p.shape for p in parameters], flat, self.context.meter.step))
        if self.context.staged:
            buffer.copy_(flat)
