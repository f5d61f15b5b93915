"""ZeRO: data parallelism with sharded optimizer state (stage 1), gradients too (stage 2), or all states (stage 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from shardscope.errors import SpecError
from shardscope.machine import can_share_memory
from shardscope.methods.compressors.packed import PackedCompression
from shardscope.spec.method import required
from shardscope.spec.numbers import Count
from shardscope.spec.shard_buffers import ShardBufferSizes
from shardscope.spec.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardscope.analytic.communication import ShardCollectives, Traffic
    from shardscope.analytic.communication.plan import StepPlan
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.analytic.schedules.stage_passes import StagePass
    from shardscope.analytic.sharding import Ints
    from shardscope.spec.job import Job
    from shardscope.spec.model.step import ParameterRow


class ZeroStrategy(Strategy):
    """Base class of the three ZeRO stages (Rajbhandari et al., arXiv 1910.02054)."""

    variant = "collectives"
    family = "State in shards"
    carries = frozenset({"sums", "packets"})
    composes = True

    collectives: Literal["ring", "backend"] = "ring"
    """Which collectives to use: Shardscope's own metered reduce-scatter and all-gather (``ring``), or, for comparison,
    those of gloo or NCCL (``backend``)."""

    @property
    def label(self) -> str:
        """Name of the stage, such as ``zero-3``, or ``zero-3:backend`` with the backend's own collectives."""
        return self.name if self.collectives == "ring" else f"{self.name}:{self.collectives}"

    def degrees(self, world_size: int) -> Mapping[str, Any] | None:
        """Return the degrees of the layout: data-parallel replicas with sharded states."""
        return {"data": world_size, "zero": self.zero_stage}

    def _carriers(self, step: JobStep) -> ShardCollectives:
        """Return the settings of the collectives that exchange gradients and parameters."""
        from shardscope.analytic.communication import ShardCollectives

        now = step.compression
        return ShardCollectives(
            step.element_bytes,
            compression=now if isinstance(now, PackedCompression) else None,
            backend=None if self.collectives == "ring" else step.backend,
            shares=self.shares(step),
        )

    def shares(self, step: JobStep) -> tuple[int, ...] | None:
        """Return the relative sizes of the ranks' shards; None if they are equal."""
        return None

    def _buffer_bytes(self, step: JobStep, gathered: list[int], reduced: list[int], ranks: int) -> int | None:
        """Return the bytes of the ring's receive buffers and of error-feedback residuals on each rank of a group.

        Args:
            step: The training step.
            gathered: Number of elements in each flat tensor that is gathered, including padding.
            reduced: Number of elements in each flat tensor that is reduced, including padding.
            ranks: Number of ranks in the group.
        """
        from shardscope.analytic.memory.held import ring_buffer_bytes
        from shardscope.analytic.memory.work_space import compression_state_bytes

        now, sums = step.compression, [(size, step.element_bytes) for size in [*gathered, *reduced]]
        if isinstance(now, PackedCompression):
            found = (now.share_collective(size // ranks, ranks) for size in reduced)
            sums += [(each.num_elements, each.element_bytes) for each in found if each.op == "sum"]
        kept = compression_state_bytes(step, [[(size,)] for size in reduced], among=ranks, scatters=True)
        ring = (
            0 if self.collectives == "backend" else ring_buffer_bytes(sums, ranks, shares=self.shares(step))
        )
        return None if kept is None else kept + ring

    def check(self, job: Job) -> None:
        """Reject compression with the backend's collectives, whose reduce-scatter cannot sum packets."""
        if job.compression.is_on and self.collectives == "backend":
            raise SpecError(
                f"strategy.collectives='backend' cannot be combined with compression={job.compression.name!r}; use "
                f"strategy={self.name!r}, whose default is collectives='ring'"
            )


class FullyShardedStrategy(ZeroStrategy):
    """Base class of the ZeRO stages that also shard gradients (2 and 3), built on torch's `fully_shard` (FSDP2).

    With compression, each micro-batch's gradients are packed and reduce-scattered. Error feedback needs a residual of
    the whole gradient in float32 on every rank, which is as much memory as the unsharded gradient that these stages
    otherwise avoid. With replicas, gradients are compressed within a group, but not between groups.
    """

    replicas: Count = 1
    """Number of groups of ranks; the shards in each group make up one whole model (HSDP). Must divide `world_size` into
    groups of at least 2 ranks. Gradients are reduce-scattered within each group, then their shards are all-reduced
    across groups. The batch is still divided over all ranks."""
    offload: bool = False
    """Keep shards of parameters, gradients and optimizer state in host memory; the optimizer then steps on the CPU.
    Without a GPU, all states are in host memory anyway, so only FSDP2's bookkeeping changes."""

    @property
    def hides_noise_because(self) -> str | None:
        """Why the gradient noise scale cannot be measured; None with ``collectives='ring'``.

        In FSDP2, only the reduce-scatter sees whole gradients, and ``ring`` replaces it with Shardscope's own.
        """
        return (
            None if self.collectives == "ring" else "a rank sees its gradients only with collectives='ring'"
        )

    def degrees(self, world_size: int) -> Mapping[str, Any] | None:
        """Return the degrees of the layout: replicas with sharded states, plus the group size if there are several."""
        groups = {} if self.replicas == 1 else {"shard": world_size // self.replicas}
        return {"data": world_size, "zero": self.zero_stage, **groups}

    @property
    def label(self) -> str:
        """Name of the stage with its options, such as ``zero-3 x2`` (two replicas) or ``zero-3 offload``."""
        replicas = "" if self.replicas == 1 else f" x{self.replicas}"
        return f"{super().label}{replicas}{' offload' if self.offload else ''}"

    def check(self, job: Job) -> None:
        """Reject replicas that do not form equal groups of at least 2 ranks, and jobs that would sum majority votes."""
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
        """Reject a job whose steps would sum several majority votes, over micro-batches or replicas."""
        parts = job.num_micro_batches
        if parts > 1:
            raise SpecError(
                f"batch.micro_batch={job.batch.micro_batch} makes {parts} micro-batches, and strategy={self.name!r} "
                f"would sum a separate vote for each with compression={job.compression.name!r}; leave micro_batch out, "
                "or use strategy='zero-1'"
            )
        if self.replicas > 1:
            raise SpecError(
                f"strategy.replicas={self.replicas} would average separate votes of {self.replicas} groups with "
                f"compression={job.compression.name!r}; use replicas=1"
            )

    @required
    def gathers(self, passes: int) -> int:
        """Return the number of times that parameters are all-gathered in a step.

        Args:
            passes: Number of passes for which they are gathered if they are freed after each.
        """
        raise NotImplementedError

    def _prefetches(self, step: JobStep) -> bool:
        """Return whether a unit is gathered during the pass of the one before it."""
        return step.normed is None and not step.follows_passes and not self.may_share_buffers(step)

    def _gathers(self, step: JobStep) -> list[int]:
        """Return the number of times that each sharding unit is gathered in a step.

        A unit that no forward pass uses is gathered only if it is prefetched, or for split backward passes.
        """
        running, usual = step.trace.running, self.gathers(2 * step.micro_batches)
        in_vain = max(1, usual - step.micro_batches) if self._prefetches(step) else 0
        return [
            self.gathers(sum(_gathers_in(each, is_used=unit in running) for each in step.passes[unit]))
            if step.passes
            else (usual if unit in running else in_vain)
            for unit in self._units(step)
        ]

    def _passes(self, step: JobStep) -> list[list[StagePass]]:
        """Return the passes of each sharding unit, and which of them gather it: the first ones."""
        from shardscope.analytic.schedules.stage_passes import StagePass

        plain = [StagePass(phase, k) for phase in ("forward", "backward") for k in range(step.micro_batches)]
        found = []
        for unit, count in zip(self._units(step), self._gathers(step), strict=True):
            is_used = unit in step.trace.running or not step.passes
            passes = step.passes[unit] if step.passes else plain
            first = {*[each for each in passes if _gathers_in(each, is_used=is_used)][:count]}
            found.append([each._replace(gathers=each in first) for each in passes])
        return found

    def traffic(self, step: JobStep) -> Traffic:
        """Return the traffic of all sharding units, and of the backend's all-reduces of norms and scalar parameters."""
        from shardscope.analytic.communication import fully_sharded_traffic
        from shardscope.analytic.communication.traffic import together
        from shardscope.analytic.job_step import shapes_of

        units = self._units(step)
        sharded = fully_sharded_traffic(
            [shapes_of(rows) for rows in units.values()], step.world_size, self._carriers(step), replicas=self.replicas,
            gathers=self._gathers(step), micro_batches=step.micro_batches,
            reduced=[shapes_of(row for row in rows if row.is_trained) for rows in units.values()],
        )  # fmt: skip
        return together(
            [sharded, self._uncut(step), *norm_traffic(step, among=step.world_size // self.replicas)]
        )

    @staticmethod
    def _uncut(step: JobStep) -> Traffic:
        """Return the traffic of the all-reduce, in float64, of the gradients of parameters that stay whole."""
        from shardscope.analytic.communication.traffic import by_backend

        num_bytes = 8 * sum(row.num_elements for row in step.trained if row.is_whole)
        return by_backend("all_reduce", num_bytes, step.world_size, backend=step.backend) if num_bytes else {}

    @staticmethod
    def _units(step: JobStep) -> dict[int, list[ParameterRow]]:
        """Return the parameters of each sharding unit, without those that stay whole."""
        units: dict[int, list[ParameterRow]] = {}
        for row in step.rows:
            if row.num_elements and not row.is_whole:
                units.setdefault(row.unit, []).append(row)
        return units

    def plan(self, step: JobStep) -> StepPlan:
        """Return the all-gathers and reduce-scatters of every unit, before and after its forward and backward pass."""
        from shardscope.analytic.communication.plan import StepPlan, When, whole
        from shardscope.analytic.communication.shard_plan import ShardedPlan
        from shardscope.analytic.job_step import shapes_of

        units = self._units(step)
        plan = ShardedPlan(step.world_size, self._carriers(step), self.replicas, step.micro_batches)
        exchanges = plan.exchanges(
            [shapes_of(rows) for rows in units.values()],
            [shapes_of(row for row in rows if row.is_trained) for rows in units.values()],
            self._passes(step),
        )
        end = When("backward", 1.0, step.micro_batches - 1)
        after = [self._uncut(step), *norm_traffic(step, among=step.world_size // self.replicas)]
        return StepPlan((*exchanges, *(each for part in after for each in whole(part, end))))

    def why_ring(
        self, *, is_delayed: bool, is_compressed: bool, has_frozen_units: bool, has_experts: bool = False
    ) -> str:
        """Return the reason why shards must be sent around a ring; empty if ranks of a host may share their memory.

        FSDP2 gathers a frozen unit for the backward pass only if it prefetches, which shared buffers do not support.

        Args:
            is_delayed: Whether messages are delayed, to emulate a link.
            is_compressed: Whether gradients are compressed.
            has_frozen_units: Whether a unit that runs has no trainable parameter.
            has_experts: Whether experts are sharded over other ranks than the rest of the model.
        """
        reasons = {
            "the job's messages are delayed": is_delayed,
            "gradients are compressed": is_compressed,
            "the model has replicas": self.replicas > 1,
            "layers are frozen": has_frozen_units,
            "ranks have different experts": has_experts,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def may_share_buffers(self, step: JobStep) -> bool:
        """Return whether ranks of one host exchange the job's shards in shared buffers, not in a ring's messages."""
        job = step.job
        if (
            job.transport not in {"auto", "cuda-ipc" if step.is_on_gpus else "shm"}
            or self.collectives != "ring"
        ):
            return False
        if step.is_on_gpus and step.backend != "gloo":  # each rank has a GPU
            return False
        running = [rows for unit, rows in self._units(step).items() if unit in step.trace.running]
        needs_ring = self.why_ring(
            is_delayed=job.link is not None,
            is_compressed=job.compression.is_on,
            has_frozen_units=not all(any(row.is_trained for row in rows) for rows in running),
            has_experts=step.normed is not None,
        )
        return step.shares_host and can_share_memory() and not needs_ring

    def _shared_bytes(self, step: JobStep, whole: Sequence[int]) -> int:
        """Return the bytes of a rank's own shared buffers, plus the ring's buffers once the messages of a step have
        been logged.

        Args:
            step: The training step.
            whole: Number of elements in each sharding unit, including padding.
        """
        from shardscope.analytic.memory.held import ring_buffer_bytes

        width, ranks = step.element_bytes, step.world_size
        logged = step.job.record.logged_step(1, step.job.last_step)
        ring = ring_buffer_bytes([(size, width) for size in whole], ranks) if 0 < logged <= step.number else 0
        return ShardBufferSizes(ranks, [size * width for size in whole]).own_bytes + ring

    def states(self, step: JobStep) -> RankStates:
        """Return the bytes of sharded states on each rank, including the padding of parameters and gradients.

        All replicas have the same states. Gathered parameters are temporary, and are counted separately.
        """
        from shardscope.analytic.memory import spread_states
        from shardscope.analytic.memory.work_space import unit_elements, updates_of_shards

        shards = step.world_size // self.replicas

        def buffer_bytes() -> Ints | None:
            whole, reduced = (unit_elements(step, shards, trained=trained) for trained in (False, True))
            if self.may_share_buffers(step):
                kept: int | None = self._shared_bytes(step, whole)
            else:
                kept = self._buffer_bytes(step, whole, reduced, shards)
            return None if kept is None else updates_of_shards(step, 2, ranks=shards) + kept

        return (
            spread_states(step, 2, ranks=shards).with_work_buffers(step, buffer_bytes).repeated(self.replicas)
        )

    def exchanged_bytes(self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1) -> float:
        """Return the total bytes sent: R (N-1) S per collective in R groups of N ranks, plus 2(R-1) S between groups.

        S is the size of the gradients in bytes. Source: Rajbhandari et al. 2020, section 7.
        """
        collectives = micro_batches + self.gathers(2 * micro_batches)
        inside = (world_size - self.replicas) * collectives * float(gradient_bytes)
        return inside + 2.0 * (self.replicas - 1) * gradient_bytes


def _gathers_in(each: StagePass, *, is_used: bool) -> bool:
    """Return whether a pass gathers a unit that is freed after passes; split backward passes gather all units."""
    return each.gathers and (is_used or each.is_split)


def norm_traffic(
    step: JobStep, *, ranks: int | None = None, among: int | None = None, of_layers: bool = True
) -> Iterator[Traffic]:
    """Yield the traffic of the all-reduces that compute norms of sharded gradients and detect an overflow on any rank.

    Args:
        step: The training step.
        ranks: Number of ranks that communicate; None means all ranks of the job.
        among: Number of ranks that together hold one whole gradient; None means all ranks.
        of_layers: Whether individual tensors are sharded, so that the norms of layers need communication too.
    """
    from shardscope.analytic.communication.traffic import by_backend, repeated

    world_size = ranks or step.world_size
    if step.normed == ():
        return
    sums = step.job.optimizer.norm_sums([len(row.shape) for row in step.normed or step.trained])
    numbers = [int(step.job.clip_norm is not None), sums.of_gradient, sums.of_layers if of_layers else 0]
    for count in filter(None, numbers):
        inside = by_backend("all_reduce", 8 * count, among or world_size, backend=step.backend)
        yield repeated(inside, world_size // (among or world_size))
    if step.job.precision == "fp16-mixed":
        yield by_backend("all_reduce", 4, world_size, backend=step.backend)
