"""Data parallelism with the backend's own all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.spec.look import MethodStyle

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.job_step import JobStep
    from shardscope.spec.job import Job


class AllReduce(BucketedStrategy):
    """DistributedDataParallel with the backend's own all-reduce, which overlaps the backward pass bucket by bucket."""

    name = "all-reduce"
    family = "All-reduce"
    look = MethodStyle("#2a86d1", "dash", "square")
    carries = frozenset({"sums", "packets", "layers", "steps"})

    @property
    def ring_directions(self) -> int:
        """Number of directions of the ring: 1, because gloo and NCCL all-reduce large buckets in a one-way ring."""
        return 1

    def sum_traffic(self, num_elements: int, element_bytes: int, step: JobStep) -> Traffic:
        from shardscope.analytic.communication.traffic import by_backend

        return by_backend("all_reduce", num_elements * element_bytes, step.world_size, backend=step.backend)

    def sum_room(self, sums: Sequence[tuple[int, int]], step: JobStep) -> int:
        """Return 0, because the backend's own buffers are not counted."""
        return 0

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.training.strategies.bucketed import BucketedRank

        return BucketedRank(job, context)
