"""ZeRO-2: sharded optimizer state and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.methods.strategies.sharded import FullyShardedStrategy
from shardscope.spec.look import Look

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class Zero2(FullyShardedStrategy):
    """Gradients partitioned as well: parameters stay gathered from the forward to the end of the backward pass.

    The bytes are those of the ring, except for FSDP2's padding: parameters are all-gathered once a step. With gradient
    accumulation they stay gathered over all micro-batches, and gradients are reduce-scattered after each, so that a
    rank keeps only shards of them: m micro-batches cost m reduce-scatters.
    """

    name = "zero-2"
    look = Look("#2b94a3", "dashdot", "diamond")
    zero_stage = 2

    def gathers(self, micro_batches: int) -> int:
        return 1

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.zero_2._torch import Zero2Rank

        return Zero2Rank(job, context)
