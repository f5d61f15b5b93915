"""ZeRO-1: sharded optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.methods.strategies.sharded import ZeroStrategy
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import MessageMiB

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.analytic.sharding import Ints
    from shardscope.spec.job import Job


class Zero1(ZeroStrategy):
    """Shards optimizer state: each rank updates an equal share of all elements, then ranks exchange weights.

    Ranks send as many bytes as with a ring: gradients are reduce-scattered and parameters all-gathered once per step.
    With compression, buckets are padded to equal shares, each share is sent as one packet, and error feedback keeps a
    residual of the whole gradient.
    """

    name = "zero-1"
    look = MethodStyle("#62bfcb", "dash", "square")
    zero_stage = 1

    bucket_mb: MessageMiB = 25.0
    """Size of a gradient bucket in MiB, 0 < value <= 1024; a bucket is sent as soon as it is complete."""

    def exchanged_bytes(self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1) -> float:
        """Return 2(W-1) S bytes, for the reduce-scatter of gradients and the all-gather of parameters."""
        from shardscope.analytic.communication import all_reduce_bytes

        return float(all_reduce_bytes(gradient_bytes, world_size))

    def traffic(self, step: JobStep) -> Traffic:
        """Return the traffic of the buckets, and that of norms, which the backend all-reduces."""
        from shardscope.analytic.communication import zero_1_traffic
        from shardscope.analytic.communication.traffic import together
        from shardscope.methods.strategies.sharded import norm_traffic

        sharded = zero_1_traffic(self._buckets(step), step.world_size, self._carriers(step))
        return together([sharded, *norm_traffic(step)])

    def _buckets(self, step: JobStep) -> list[int]:
        """Return the number of elements in each flat bucket, without padding."""
        from shardscope.analytic.sharding import bucket_elements

        capacity = int(self.bucket_mb * 2**20) // step.element_bytes
        return bucket_elements([row.num_elements for row in step.trained], capacity)

    def states(self, step: JobStep) -> RankStates:
        """Return the bytes of whole parameters and gradients in buckets, and of an equal share of optimizer state."""
        from shardscope.analytic.memory import spread_states
        from shardscope.analytic.memory.work_space import updates_of_shards

        is_padded = step.job.compression.is_on or self.collectives == "backend"
        cut: dict[str, Any] = {"stage": 1, "bucket_mb": self.bucket_mb, "is_padded": is_padded}

        def room() -> Ints | None:
            padding = step.world_size if is_padded else 1
            sizes = [-(-size // padding) * padding for size in self._buckets(step)]
            kept = self._room(step, sizes, sizes, step.world_size)
            return None if kept is None else updates_of_shards(step, **cut) + kept

        return spread_states(step, **cut).working_in(step, room)

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.zero_1._torch import Zero1Rank

        return Zero1Rank(job, context)
