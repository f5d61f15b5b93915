"""Communication hook for `DistributedDataParallel`: one thread per rank exchanges the buckets, in order."""

# No postponed annotations here: DistributedDataParallel checks the types of a hook at run time.

from collections.abc import Callable, Sequence
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
    """Calls `exchange_` for every bucket in a separate thread, while the backward pass continues.

    Args:
        ddp: The module that fills the buckets.
        context: This rank's context.
        exchange_: Function that replaces ``bucket.flat``, a CPU tensor, with its mean over all ranks.
    """

    def __init__(
        self, ddp: DistributedDataParallel, context: RankContext, exchange_: Callable[[Bucket], None]
    ) -> None:
        self.context, self.exchange_ = context, exchange_
        self.index = 0
        """Index of the bucket that is being exchanged."""
        self.is_idle = False
        """Whether to return buckets unchanged, without an exchange."""
        self._names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._sender = Sender("buckets")
        ddp.register_comm_hook(None, self._exchange)

    def close(self) -> None:
        """Stop the thread, and give up the strategy.

        DistributedDataParallel's reducer, which Python's garbage collector cannot look into, keeps this object. Through
        it, the strategy and the model would keep themselves in memory.
        """
        self._sender.close()
        self.exchange_ = _closed

    def finish(self) -> None:
        """Raise the error of the first failed exchange; called after a backward pass, when all exchanges have ended."""
        if self._sender.failure is not None:
            raise self._sender.failure

    def _exchange(self, _: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer, index, parameters = bucket.buffer(), bucket.index(), bucket.parameters()
        done: Future[Tensor] = Future(devices=None if buffer.is_cpu else [buffer.device])
        self.context.meter.handed_over = clock.now()
        if self.is_idle:
            done.set_result(buffer)
            return done

        def send() -> None:
            self.index = index
            self.context.meter.hold_gradients()
            named = [(self._names[id(parameter)], parameter) for parameter in parameters]
            mean_of(buffer, named, self.context, self.exchange_)

        # the result is set even after a failure, as DistributedDataParallel would report an unrelated error otherwise;
        # `finish` raises the real error
        self._sender.submit(send).add_done_callback(lambda _: done.set_result(buffer))
        return done


def _closed(_: Bucket) -> None:
    raise AssertionError("no bucket is exchanged after `close`")


def mean_of(
    buffer: Tensor,
    named: Sequence[tuple[str, Tensor]],
    context: RankContext,
    exchange_: Callable[[Bucket], None],
) -> None:
    """Replace a flat tensor of gradients with its mean over all ranks, copied through the CPU if necessary.

    Args:
        buffer: The gradients of all parameters, one after the other.
        named: The parameters, with their names.
        context: This rank's context.
        exchange_: As in `BucketHook`.
    """
    is_staged = context.is_staged(buffer.nbytes, rounds=2 * (context.world_size - 1))
    flat = buffer.cpu() if is_staged else buffer
    names, shapes = [name for name, _ in named], [parameter.shape for _, parameter in named]
    exchange_(Bucket(names, shapes, flat, context.meter.step))
    if is_staged:
        buffer.copy_(flat)
