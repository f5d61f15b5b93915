"""ZeRO: data parallel without redundancy. Each stage partitions one kind more of what every rank used to hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from shardscope.errors import SpecError
from shardscope.spec.compression import Carriage
from shardscope.spec.numbers import Count, MessageMiB
from shardscope.spec.strategy.base import StrategySpec

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class Zero(StrategySpec):
    """Base of the three stages of ZeRO (Rajbhandari et al., arXiv 1910.02054)."""

    collectives: Literal["ring", "backend"] = "ring"
    """``ring``: our own metered reduce-scatter and all-gather. ``backend``: those of gloo or NCCL, to compare with."""
    _variant: ClassVar[str | None] = "collectives"
    carries: ClassVar[frozenset[Carriage]] = frozenset({"sums", "packets"})

    @property
    def label(self) -> str:
        """``zero-3``; ``zero-3:backend`` with the backend's own collectives."""
        return self.kind if self.collectives == "ring" else f"{self.kind}:{self.collectives}"

    def check(self, job: Job) -> None:
        """The backends' own reduce-scatter adds numbers up as they are."""
        if job.compression.is_on and self.collectives == "backend":
            raise SpecError(
                f"strategy.collectives='backend' does not go with compression={job.compression.name!r}; use "
                f"strategy={self.kind!r}, which has collectives='ring'"
            )


class Zero1(Zero):
    """Optimizer state partitioned: each rank updates an equal share of all elements, then they exchange weights.

    The bytes are those of the ring: gradients are reduce-scattered and parameters all-gathered once a step. Compressed,
    buckets are padded to equal shares, each share travels as one packet, and error feedback keeps a whole gradient.
    """

    kind: Literal["zero-1"] = "zero-1"
    bucket_mb: MessageMiB = 25.0
    """Size of a gradient bucket in MiB; a bucket is sent as soon as all its gradients are there. 0 < value <= 1024."""


class FullySharded(Zero):
    """Base of the stages that hold gradients only in shards, on torch's `fully_shard` (FSDP2).

    Compressed, each micro-batch's gradients are packed and reduce-scattered. Error feedback remembers what a rank has
    not sent of its own whole gradient: that is the memory of one unsharded gradient in float32 on every rank, which
    these stages otherwise save. With replicas, gradients are compressed inside a group, and not between groups.
    """

    replicas: Count = 1
    """Groups that each hold the whole model in shards (HSDP). Must divide `world_size` and leave at least 2 ranks a
    group. Gradients are reduce-scattered within a group, then their shards all-reduced across the groups. The batch
    is divided over all ranks as ever."""
    offload: bool = False
    """Keep shards of parameters, gradients and optimizer state in host memory; the optimizer then steps on the CPU.
    On a machine without a GPU they already are there, so it changes nothing but FSDP2's bookkeeping."""

    @property
    def hides_noise_because(self) -> str | None:
        """FSDP2 shows whole gradients to nobody but what reduces them."""
        return (
            None if self.collectives == "ring" else "only collectives='ring' shows a rank its own gradients"
        )

    @property
    def label(self) -> str:
        """As for every stage; ``zero-3 x2`` with two replicas, ``zero-3 offload`` with offloading."""
        replicas = "" if self.replicas == 1 else f" x{self.replicas}"
        return f"{super().label}{replicas}{' offload' if self.offload else ''}"

    def check(self, job: Job) -> None:
        """The replicas divide the ranks, and each is worth sharding."""
        super().check(job)
        valid = [r for r in range(1, job.world_size) if job.world_size % r == 0]
        if self.replicas not in valid:
            raise SpecError(
                f"strategy.replicas={self.replicas} does not divide world_size={job.world_size} into groups of at "
                f"least 2 ranks; use {' or '.join(map(str, valid))}"
            )
        if job.compression.is_a_vote:
            self._check_votes(job)

    def _check_votes(self, job: Job) -> None:
        """A step must end with one vote: gradients of micro-batches and of replicas are added up, votes are not."""
        parts = job.batch.accumulation(job.world_size)
        if parts > 1:
            raise SpecError(
                f"batch.micro_size={job.batch.micro_size} makes {parts} micro-batches, and strategy={self.kind!r} "
                f"would add up a vote on each with compression={job.compression.name!r}; leave it out, or use "
                "strategy='zero-1'"
            )
        if self.replicas > 1:
            raise SpecError(
                f"strategy.replicas={self.replicas} would average the votes of as many groups with "
                f"compression={job.compression.name!r}; use replicas=1"
            )


class Zero2(FullySharded):
    """Gradients partitioned as well: parameters stay gathered from the forward to the end of the backward pass.

    The bytes are those of the ring, but for FSDP2's padding: parameters are all-gathered once a step. With gradient
    accumulation they stay gathered over all micro-batches, and gradients are reduce-scattered after each, so that a
    rank never holds more than shards of them: m micro-batches cost m reduce-scatters.
    """

    kind: Literal["zero-2"] = "zero-2"


class Zero3(FullySharded):
    """Parameters partitioned as well: each block is gathered for its forward pass and again for its backward pass.

    The bytes are 1.5 times those of the ring, but for FSDP2's padding, and again for each micro-batch.
    """

    kind: Literal["zero-3"] = "zero-3"
