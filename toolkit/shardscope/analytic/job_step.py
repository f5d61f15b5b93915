"""One step of a job with a traced model; strategies compute each rank's traffic and memory from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, Literal

from shardscope.analytic.sharding import replica_buckets
from shardscope.spec.compression import Compression
from shardscope.spec.job import Job
from shardscope.spec.model.step import ParameterRow, StepTrace
from shardscope.spec.optimizer import OptimizerStates

if TYPE_CHECKING:
    from shardscope.analytic.schedules.stage_passes import StagePass

Backend = Literal["gloo", "nccl"]
SETTLED = 3
"""First step that starts with optimizer states and DistributedDataParallel's final buckets already in place."""


@dataclass(frozen=True)
class JobStep:
    """One step of a job whose model has been traced.

    Attributes:
        job: The job.
        trace: Trace of one step of the job's model; traced with tensor shapes only, without data.
        number: Number of the step, from 1.
        backend: Library that `torch.distributed` uses for the collectives that Shardscope does not implement itself.
        is_on_gpus: Whether the ranks compute on GPUs; ranks that share a GPU use gloo.
        slowness: Compute time of each rank relative to the slowest device; empty if all devices are equal.
        update_slowness: Time of each rank's parameter update relative to the slowest device, as given by the time to
            read and write the states; empty if all devices are equal.
        memory: Memory of each rank's device, in bytes; empty if it is not known.
        is_usual: Whether the step represents most steps of the job: a cache that is filled in the first epoch is then
            assumed to be full, whatever the step number, unless the job ends earlier.
        sums_layers: Whether each rank holds a part of the model, so that norms of layers need sums over the tensor axis
            as well, for which optimizers keep the updates of all layers.
        shares_host: Whether CPU ranks can communicate through shared memory if the job permits it.
        follows_passes: Whether the strategy exchanges gradients after passes that a pipeline has run, in the reverse
            order of parameters, instead of during the backward passes of a `DistributedDataParallel`.
        passes: The passes of each unit in a step, by unit, in a pipeline whose schedule splits backward passes; empty
            if each micro-batch has one forward and one backward pass.
        expert_loads: Fraction of the choices of a rank's tokens that each expert gets, by layer with experts; empty for
            an even load.
        flops: FLOPs of a rank's forward pass for one sample, with an even load of experts; 0 if not known.
        extra_flops: FLOPs of the forward pass of each layer of a pipeline for one sample, on the rank whose experts get
            the most tokens, in addition to those with an even load; empty for an even load.
        normed: Parameters whose norms the ranks sum, if they share only some parameters of a model whose experts are on
            different ranks: all of the model's on data ranks, and none on those that have the same experts. None if
            they share all parameters.
    """

    job: Job
    trace: StepTrace
    number: int
    backend: Backend = "gloo"
    is_on_gpus: bool = False
    slowness: tuple[float, ...] = ()
    update_slowness: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    is_usual: bool = False
    sums_layers: bool = False
    shares_host: bool = True
    follows_passes: bool = False
    passes: tuple[tuple[StagePass, ...], ...] = ()
    expert_loads: tuple[tuple[float, ...], ...] = ()
    flops: float = 0.0
    extra_flops: tuple[float, ...] = ()
    normed: tuple[ParameterRow, ...] | None = None

    def slow(self, rank: int) -> float:
        """Return the compute time of a rank relative to the slowest device; at most 1."""
        return self.slowness[rank] if self.slowness else 1.0

    def slow_update(self, rank: int) -> float:
        """Return the time of a rank's parameter update relative to the slowest device; at most 1."""
        return self.update_slowness[rank] if self.update_slowness else 1.0

    def in_blocks(self, job: Job, size: int) -> JobStep:
        """Return the step of a job whose ranks each stand for `size` neighbouring ranks: the worst of them."""

        def worst(values: tuple[float, ...], of: Callable[[tuple[float, ...]], float]) -> tuple[float, ...]:
            return tuple(of(values[at : at + size]) for at in range(0, len(values), size))

        return replace(
            self, job=job, slowness=worst(self.slowness, max),
            update_slowness=worst(self.update_slowness, max), memory=worst(self.memory, min),
        )  # fmt: skip

    def of_ranks(
        self, ranks: range, job: Job, trace: StepTrace, passes: Iterable[tuple[StagePass, ...]] = ()
    ) -> JobStep:
        """Return the step of some of the ranks, which train a part of the model after the passes of a pipeline."""
        part = slice(ranks.start, ranks.stop)
        return replace(
            self, job=job, trace=trace, slowness=self.slowness[part], update_slowness=self.update_slowness[part],
            memory=self.memory[part], follows_passes=True, passes=tuple(passes),
        )  # fmt: skip

    @property
    def alike(self) -> JobStep:
        """The same step on ranks that are all as slow as the slowest device, with an even load of experts."""
        return replace(self, slowness=(), expert_loads=())

    @property
    def world_size(self) -> int:
        """W, the number of ranks."""
        return self.job.world_size

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a weight, a gradient or an optimizer moment."""
        return self.job.element_bytes

    @property
    def kept(self) -> OptimizerStates:
        """Size of the optimizer state, including state added by compression."""
        return self.job.compression.optimizer_states(self.job.optimizer.states)

    @cached_property
    def trained(self) -> list[ParameterRow]:
        """The trained parameters, in the module's order."""
        return [row for row in self.trace.parameters if row.is_trained]

    @cached_property
    def arriving(self) -> list[ParameterRow]:
        """The trained parameters, in the order in which the backward pass completes their gradients."""
        if self.follows_passes:
            return self.trained[::-1]
        rows = self.trace.parameters
        found = [rows[place] for place in self.trace.gradient_order]
        return found if len(found) == len(self.trained) else self.trained[::-1]

    @cached_property
    def rows(self) -> list[ParameterRow]:
        """All parameters, in the module's order; parameters that do not affect the loss are marked as frozen."""
        reached, rows = set(self.trace.gradient_order), self.trace.parameters
        if not reached or all(place in reached for place, row in enumerate(rows) if row.is_trained):
            return list(rows)
        return [row if place in reached else row.replace(is_trained=False) for place, row in enumerate(rows)]

    def buckets(self, bucket_mb: float) -> list[list[tuple[int, ...]]]:
        """Return the tensor shapes in each bucket of `DistributedDataParallel`, in the order in which they are sent.

        In step 1, `DistributedDataParallel` puts all gradients in one bucket, unless they are compressed.

        Args:
            bucket_mb: Size of a bucket in MiB.
        """
        if self.number == 1 and not self.job.compression.is_on and not self.follows_passes:
            return [shapes_of(self.arriving)]
        return replica_buckets(shapes_of(self.arriving), bucket_mb, element_bytes=self.element_bytes)

    def packed(self, bucket_mb: float) -> list[list[tuple[int, ...]]]:
        """Return the tensor shapes in each bucket that is compressed by itself, or summed.

        These are the buckets of `buckets`, except that compression keeps the parts of divided tensors apart from the
        tensors that all tensor ranks have whole.
        """
        found = self.buckets(bucket_mb)
        if not self.job.compression.is_on or not any(row.is_divided for row in self.arriving):
            return found
        rows = iter(self.arriving)
        of_rows = [[next(rows) for _ in shapes] for shapes in found]
        apart = (
            shapes_of(row for row in bucket if row.is_divided == is_divided)
            for bucket in of_rows
            for is_divided in (False, True)
        )
        return [shapes for shapes in apart if shapes]

    @property
    def num_elements(self) -> int:
        """Number of elements of all trained parameters."""
        return sum(row.num_elements for row in self.trained)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that a rank processes in a step."""
        return self.job.num_micro_batches

    @property
    def samples(self) -> int:
        """Number of samples in one micro-batch of a rank."""
        return self.job.batch.per_rank(self.job.num_data_ranks) // self.micro_batches

    @property
    def saved_bytes(self) -> float | None:
        """Bytes of activations that one micro-batch saves for the backward pass; None if the loss was not traced."""
        saved = self.trace.saved_bytes.get(self.job.recompute)
        return None if saved is None else self.samples * saved

    @property
    def is_compressed(self) -> bool:
        """Whether gradients are compressed in this step; some methods do not compress in the first steps."""
        compression = self.job.compression
        return compression.is_on and self.number > compression.uncompressed(self.job.steps)

    @property
    def compression(self) -> Compression:
        """The job's compression with its settings in this step; ``none`` if gradients are not compressed."""
        now = self.job.compression
        is_waiting = now.is_on and not self.is_compressed
        return Compression.by_name("none") if is_waiting else now.at_step(self.number)


def shapes_of(rows: Iterable[ParameterRow]) -> list[tuple[int, ...]]:
    """Return the shapes of parameter tensors."""
    return [tuple(row.shape) for row in rows]


def settled_step(job: Job) -> int:
    """Return the number of the first step after all warm-ups in which every periodic message is sent."""
    first = max(SETTLED, job.compression.uncompressed(job.steps) + 1)
    if not job.compression.is_fixed:
        first = max(first, job.last_step)
    period = lcm(job.compression.period, getattr(job.strategy, "mix_every", 1))
    return -(-first // period) * period
