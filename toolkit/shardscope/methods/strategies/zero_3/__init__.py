"""ZeRO-3: sharded optimizer state, gradients and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from shardscope.errors import SpecError, quoted
from shardscope.methods.strategies.sharded import FullyShardedStrategy
from shardscope.spec.look import MethodStyle

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class Zero3(FullyShardedStrategy):
    """Shards all states; the parameters of each block are gathered for its forward and again for its backward pass.

    Except for FSDP2's padding, ranks send 1.5 times as many bytes per micro-batch as in a ring all-reduce. Shards are
    equal: `fully_shard` pads each shard to the size of the largest, so a smaller shard would save no memory.
    """

    name = "zero-3"
    look = MethodStyle("#1a6c79", "longdash", "star")
    zero_stage = 3

    @model_validator(mode="before")
    @classmethod
    def _refuse_uneven(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("shards") is not None:
            raise SpecError(
                f"strategy.shards={quoted(fields['shards'])} cannot be combined with strategy={cls.name!r}, whose "
                "parameters PyTorch's fully_shard cuts into equal shards and pads to the largest; leave shards out, or "
                "use ss.Zero2(shards=...)"
            )
        return fields

    def gathers(self, passes: int) -> int:
        return passes

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.zero_3._torch import Zero3Rank

        return Zero3Rank(job, context)
