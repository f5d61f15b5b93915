"""ZeRO stages 1 and 2 in flat buckets, each divided into one chunk per rank, of equal size or by given shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from shardscope.errors import SpecError
from shardscope.methods.strategies.sharded import ZeroStrategy, norm_traffic
from shardscope.spec.numbers import Count, MessageMiB
from shardscope.spec.shares import BY_MEMORY, reader_of_shares, shares_by_memory
from shardscope.spec.units import plural

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import StepPlan
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.analytic.sharding import Ints
    from shardscope.spec.job import Job

Shards = Annotated[
    tuple[Count, ...] | Literal["memory"] | None,
    BeforeValidator(reader_of_shares("strategy.shards", BY_MEMORY)),
]
"""Type of the field for the relative sizes of the ranks' shards."""


class FlatShards(ZeroStrategy):
    """Base class of ZeRO stages with replicated parameters, whose flat buckets are divided into one shard per rank."""

    shards_gradients: ClassVar[bool] = False
    """Whether a rank keeps only its shards of the gradients, which are reduced after every micro-batch."""

    bucket_mb: MessageMiB = 25.0
    """Size of a gradient bucket in MiB, 0 < value <= 1024; a bucket is sent as soon as it is complete."""
    shards: Shards = None
    """Relative sizes of the ranks' shards of the optimizer state, for ranks with different amounts of memory: one
    number per rank, such as ``(2, 2, 1, 1)``, or ``"memory"``, in proportion to the device memory that weights and
    gradients leave free on each rank. On an emulated cluster, this is the memory given in the cluster's spec. None for
    equal shards."""

    @property
    def label(self) -> str:
        """Name of the stage with its collectives and shards, such as ``zero-1:2:1`` or ``zero-1:memory``."""
        if self.shards is None:
            return super().label
        return (
            f"{self.name}:{self.shards if isinstance(self.shards, str) else ':'.join(map(str, self.shards))}"
        )

    def degrees(self, world_size: int) -> Mapping[str, Any] | None:
        """Return the degrees of the layout; None with uneven shards, which a layout cannot represent."""
        return super().degrees(world_size) if self.shards is None else None

    def check(self, job: Job) -> None:
        """Reject uneven shards for a different number of ranks, or if all shards have to be equal."""
        super().check(job)
        if self.shards is None:
            return
        told = f"strategy.shards={self.shards!r}"
        if isinstance(self.shards, tuple) and len(self.shards) != job.world_size:
            raise SpecError(
                f"{told} has {plural(len(self.shards), 'number')}, but world_size={job.world_size}; give "
                f"{plural(job.world_size, 'number')}, or {BY_MEMORY!r}"
            )
        if self.collectives == "backend":
            raise SpecError(
                f"{told} cannot be combined with collectives='backend', whose shards are equal; use collectives='ring'"
            )
        if job.compression.is_on:
            raise SpecError(
                f"{told} cannot be combined with compression={job.compression.name!r}, which packs equal shards; leave "
                "one of them out"
            )

    def whole_bytes(self, weights: int, buckets: Sequence[int]) -> int:
        """Return the bytes that every rank holds in addition to its shards.

        Args:
            weights: Bytes of all weights.
            buckets: Bytes of each gradient bucket.
        """
        return weights + (bucket_buffers(buckets) if self.shards_gradients else sum(buckets))

    def shares(self, step: JobStep) -> tuple[int, ...] | None:
        """Return the relative sizes of the ranks' shards; None if they are equal.

        Raises:
            SpecError: The emulated cluster does not specify the memory, or a rank has no memory left.
        """
        if not isinstance(self.shards, str):
            return self.shards
        from shardscope.analytic.memory.held import Sharding, weight_bytes

        if not step.memory:  # ranks of one machine, which share its memory equally
            return (1,) * step.world_size
        weights, _ = weight_bytes(
            step.rows, Sharding(1, step.world_size, 0, self.bucket_mb, step.element_bytes)
        )
        buckets = [step.element_bytes * size for size in self._buckets(step)]
        return shares_by_memory(step.memory, self.whole_bytes(weights, buckets))

    def traffic(self, step: JobStep) -> Traffic:
        """Return the traffic of the buckets, and of norms, which the backend all-reduces."""
        from shardscope.analytic.communication import flat_shards_traffic
        from shardscope.analytic.communication.traffic import together

        sharded = flat_shards_traffic(
            self._buckets(step), step.world_size, self._carriers(step), reductions=self._reductions(step)
        )
        return together([sharded, *norm_traffic(step)])

    def plan(self, step: JobStep) -> StepPlan:
        """Return a reduce-scatter of each bucket after a backward pass, and an all-gather after the update."""
        from shardscope.analytic.communication.plan import StepPlan, When, whole
        from shardscope.analytic.communication.shard_plan import ShardedPlan

        plan = ShardedPlan(step.world_size, self._carriers(step), 1, step.micro_batches)
        buckets, end = self._buckets(step), When("backward", 1.0, step.micro_batches - 1)
        norms = [each for part in norm_traffic(step) for each in whole(part, end)]
        return StepPlan((*plan.of_buckets(buckets, reductions=self._reductions(step)), *norms))

    def _reductions(self, step: JobStep) -> int:
        """Return the number of micro-batches of a step whose gradients are reduced."""
        return step.micro_batches if self.shards_gradients else 1

    def _buckets(self, step: JobStep) -> list[int]:
        """Return the number of elements in each flat bucket, without padding."""
        from shardscope.analytic.sharding import bucket_elements

        capacity = int(self.bucket_mb * 2**20) // step.element_bytes
        return bucket_elements([row.num_elements for row in step.trained], capacity)

    def states(self, step: JobStep) -> RankStates:
        """Return the bytes on each rank: whole parameters, gradients in buckets or shards, and a share of the state."""
        from shardscope.analytic.memory import spread_states
        from shardscope.analytic.memory.work_space import updates_of_shards
        from shardscope.analytic.sharding import flat_shard_elements

        is_padded = step.job.compression.is_on or self.collectives == "backend"
        shares, buckets, width = self.shares(step), self._buckets(step), step.element_bytes
        cut: dict[str, Any] = {
            "stage": 1, "bucket_mb": self.bucket_mb, "is_padded": is_padded, "shares": shares,
        }  # fmt: skip

        def buffer_bytes() -> Ints | None:
            padding = step.world_size if is_padded else 1
            sizes = [-(-size // padding) * padding for size in buckets]
            kept = self._buffer_bytes(step, sizes, sizes, step.world_size)
            if kept is None:
                return None
            filled = bucket_buffers([width * size for size in buckets]) if self.shards_gradients else 0
            return updates_of_shards(step, **cut) + kept + filled

        found = spread_states(step, **cut)
        if self.shards_gradients:
            found = found._replace(
                gradients=width * flat_shard_elements(buckets, step.world_size, shares=shares)
            )
        return found.with_work_buffers(step, buffer_bytes)


def bucket_buffers(buckets: Sequence[int]) -> int:
    """Return the bytes of up to two buffers for gradients that a rank does not keep: one is filled, one is reduced.

    Args:
        buckets: Bytes of each bucket.
    """
    return min(2, len(buckets)) * max(buckets, default=0)
