"""ZeRO-1: sharded optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.methods.strategies.flat_shards import FlatShards
from shardscope.spec.look import MethodStyle

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class Zero1(FlatShards):
    """Shards optimizer state: each rank updates a share of all elements, then ranks exchange parameters.

    The shares are equal, or uneven with `shards`, for ranks with different amounts of memory. In either case,
    ranks together send as many bytes as in a ring all-reduce: gradients are reduce-scattered, and parameters
    all-gathered, once per step. With compression, buckets are padded to equal shares, each share is sent as one packet,
    and error feedback keeps a residual of the whole gradient.

    Example:
        >>> from shardscope.spec import Job
        >>> Job(model="mlp", data="digits", strategy=Zero1(shards=(2, 1)), world_size=2).strategy.label
        'zero-1:2:1'
    """

    name = "zero-1"
    look = MethodStyle("#62bfcb", "dash", "square")
    zero_stage = 1

    def exchanged_bytes(self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1) -> float:
        """Return the total bytes sent: 2(W-1) S for W ranks and S bytes of gradients, half in the all-gather."""
        from shardscope.analytic.communication import all_reduce_bytes

        return float(all_reduce_bytes(gradient_bytes, world_size))

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.zero_1._torch import Zero1Rank

        return Zero1Rank(job, context)
