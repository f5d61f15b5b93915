"""ZeRO-2: sharded optimizer state and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.errors import SpecError
from shardscope.methods.strategies.flat_shards import FlatShards, Shards
from shardscope.methods.strategies.sharded import FullyShardedStrategy
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import MessageMiB

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import StepPlan
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.spec.job import Job


class Zero2(FlatShards, FullyShardedStrategy):
    """Shards optimizer state and gradients; parameters stay gathered from the forward to the end of the backward pass.

    Parameters are all-gathered once per step, so except for FSDP2's padding, ranks send as many bytes as in a ring
    all-reduce. With gradient accumulation, parameters stay gathered over all micro-batches, but gradients are
    reduce-scattered after each micro-batch, so that a rank keeps only its own shards of the gradients.

    PyTorch's `fully_shard` cuts equal shards. With `shards`, which may be uneven, the gradients go through flat buckets
    instead, as in ZeRO-1 and as in DeepSpeed: parameters stay whole on every rank, and a rank has buffers for two
    buckets of whole gradients. If a model uses its modules in a different order from their registration, gradients that
    arrive before a buffer is free for their bucket are stored outside these buffers; neither the prediction nor
    `Run.memory()` counts them.

    Example:
        >>> from shardscope.spec import Job
        >>> Job(model="mlp", data="digits", strategy=Zero2(shards=(2, 1)), world_size=2).strategy.label
        'zero-2:2:1'
    """

    name = "zero-2"
    look = MethodStyle("#2b94a3", "dashdot", "diamond")
    zero_stage = 2
    shards_gradients = True

    bucket_mb: MessageMiB = 25.0
    """With `shards`: size of a gradient bucket in MiB, 0 < value <= 1024; a bucket is reduced as soon as it is
    complete, and a rank keeps buffers for two buckets."""
    shards: Shards = None
    """Relative sizes of the ranks' shards of gradients and optimizer state, for ranks with different amounts of memory:
    one number per rank, such as ``(2, 2, 1, 1)``, or ``"memory"``, in proportion to the device memory that weights and
    gradient buckets leave free on each rank. None for the equal shards of FSDP2."""

    @property
    def held_stage(self) -> int:
        return self.zero_stage if self.shards is None else 1

    @property
    def hides_noise_because(self) -> str | None:
        """Why the gradient noise scale cannot be measured; None with `shards` or with ``collectives='ring'``."""
        return super().hides_noise_because if self.shards is None else None

    def check(self, job: Job) -> None:
        """Reject options of FSDP2 in combination with `shards`, and a bucket size without `shards`."""
        super().check(job)
        if self.shards is None:
            if self.bucket_mb != type(self).model_fields["bucket_mb"].default:
                raise SpecError(
                    f"strategy.bucket_mb={self.bucket_mb:g} has no effect without shards, because FSDP2 reduces the "
                    "gradients of one block at a time; give shards, or leave bucket_mb out"
                )
            return
        for name in ("replicas", "offload"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise SpecError(
                    f"strategy.shards={self.shards!r} cannot be combined with {name}={value!r}, which needs the equal "
                    "shards of FSDP2; leave one of them out"
                )

    def gathers(self, passes: int) -> int:
        return min(1, passes)

    @property
    def _form(self) -> type[FlatShards | FullyShardedStrategy]:
        """The base class whose formulas apply."""
        return FullyShardedStrategy if self.shards is None else FlatShards

    def traffic(self, step: JobStep) -> Traffic:
        return self._form.traffic(self, step)

    def plan(self, step: JobStep) -> StepPlan:
        return self._form.plan(self, step)

    def states(self, step: JobStep) -> RankStates:
        return self._form.states(self, step)

    def build(self, job: Job, context: Any) -> Any:
        if self.shards is not None:
            from shardscope.methods.strategies.zero_2._torch_flat import FlatZero2Rank

            return FlatZero2Rank(job, context)
        from shardscope.methods.strategies.zero_2._torch import Zero2Rank

        return Zero2Rank(job, context)
