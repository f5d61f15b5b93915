"""ZeRO-2: sharded optimizer state and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.methods.strategies.sharded import FullyShardedStrategy
from shardscope.spec.look import MethodStyle

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class Zero2(FullyShardedStrategy):
    """Shards optimizer state and gradients; parameters stay gathered from the forward to the end of the backward pass.

    Parameters are all-gathered once per step, so except for FSDP2's padding, ranks send as many bytes as in a ring
    all-reduce. With gradient accumulation, parameters stay gathered over all micro-batches, but gradients are
    reduce-scattered after each micro-batch, so that a rank keeps only its own shards of the gradients.
    """

    name = "zero-2"
    look = MethodStyle("#2b94a3", "dashdot", "diamond")
    zero_stage = 2

    def gathers(self, micro_batches: int) -> int:
        return 1

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.zero_2._torch import Zero2Rank

        return Zero2Rank(job, context)
