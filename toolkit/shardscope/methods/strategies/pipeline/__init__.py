"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.spec.divisors import divisors, divisors_text
from shardscope.spec.look import MethodStyle
from shardscope.spec.models import model_config
from shardscope.spec.numbers import Count, CountOrZero
from shardscope.spec.partition import even_split, optimal_split, require_enough_layers
from shardscope.spec.pipeline_schedule import AnyPipelineSchedule, PipelineSchedule
from shardscope.spec.strategy import Strategy, Work

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.analytic.schedules.table import ScheduleTable
    from shardscope.spec.job import Job
    from shardscope.spec.model.step import PipelinePiece, StepTrace

_MOST_LISTED = 1 << 16
"""Largest number of operations in a schedule table that is built for a prediction."""
_MOST_CHECKED = 4096
"""Largest product of micro-batches and ranks for which the order of operations is checked before a launch."""


class Pipeline(Strategy):
    """Layers are split into stages on different ranks; micro-batches pass through all stages, forward and backward.

    All ranks work on the whole batch: the first stage reads its inputs, the last stage its targets. A user's model must
    be an `nn.Sequential`, or have a method ``pipeline_layers()`` that returns its layers as (name, module) in order.
    """

    name = "pipeline"
    variant = "schedule"
    family = "Layers apart"
    look = MethodStyle("#a35a3a", "longdashdot", "hexagon")

    schedule: AnyPipelineSchedule = Field(default_factory=lambda: PipelineSchedule("1f1b"))
    """The order of forward and backward passes: a schedule, or its name."""
    virtual_stages: int | None = Field(default=None, ge=1, le=64)
    """Number of stages on each rank; None means the schedule's default."""
    microbatches: Count | None = None
    """Micro-batches in one pass through the pipeline; None means all of a step, and fewer mean several passes."""
    split: Literal["time", "memory", "even"] | tuple[CountOrZero, ...] = "time"
    """How layers are split into stages: by measured time, by memory, evenly by number, or as a tuple with the number of
    layers in each stage."""

    @model_validator(mode="after")
    def _possible_stages(self) -> Self:
        if self.virtual_stages is not None and self.schedule.is_here:
            self.schedule.check_stages(self.virtual_stages)
        return self

    @property
    def label(self) -> str:
        """Name of strategy and schedule, such as ``pipeline:1f1b``."""
        return f"{self.name}:{self.schedule.name}"

    @property
    def stages_per_rank(self) -> int:
        """Number of stages on each rank, with the default filled in."""
        return self.virtual_stages or self.schedule.default_stages

    def degrees(self, world_size: int) -> Mapping[str, Any]:
        """Return the degrees of the layout: pipeline parallelism only."""
        stages = {"virtual_stages": self.stages_per_rank} if self.schedule.most_stages is None else {}
        return {"pipeline": world_size, "schedule": self.schedule.name, **stages}

    def num_data_ranks(self, world_size: int) -> int:
        """Return 1, because all ranks work on the same batch."""
        return 1

    def stage_ranks(self, world_size: int) -> tuple[int, ...]:
        """Return the rank that holds each stage, in stage order."""
        return self.schedule.stage_ranks(world_size, self.stages_per_rank)

    def role(self, rank: int, world_size: int) -> str:
        """Return the stages of a rank in words, such as ``stage 2`` or ``stages 1 and 6``."""
        held = [str(stage) for stage, at in enumerate(self.stage_ranks(world_size)) if at == rank]
        if len(held) == 1:
            return f"stage {held[0]}"
        return f"stages {', '.join(held[:-1])} and {held[-1]}"

    def passes(self, num_micro_batches: int) -> int:
        """Return the number of passes through the pipeline in a step with `num_micro_batches` micro-batches."""
        return num_micro_batches // (self.microbatches or num_micro_batches)

    def suggested_micro_batch(self, global_batch: int, world_size: int) -> int | None:
        """Return the largest size with at least two micro-batches per rank; if none, the largest that is accepted."""
        fitting = self._fitting_micro_batches(global_batch, world_size)
        several = [size for size in fitting if global_batch // size >= 2 * world_size]
        return next(iter(several or fitting), None)

    def _fitting_micro_batches(self, global_batch: int, world_size: int) -> list[int]:
        """Return the micro-batch sizes that the schedule accepts, largest first."""
        sizes = reversed(divisors(global_batch))
        return [size for size in sizes if self.schedule.accepts(global_batch // size, world_size)]

    @property
    def hides_noise_because(self) -> str:
        """Why the gradient noise scale cannot be measured under this strategy."""
        return "each rank holds the gradients of its own stages only"

    def check(self, job: Job) -> None:
        """Refuse too few micro-batches, too few layers, and an explicit split that does not add up.

        Raises:
            SpecError: The job is invalid; the message names the field, its value and a remedy.
        """
        if self.schedule.is_here:
            self._check_microbatches(job)
            self._check_layers(job)
            self._check_order(job)

    def _check_microbatches(self, job: Job) -> None:
        total = job.num_micro_batches
        count = self.microbatches or total
        if total % count:
            raise SpecError(
                f"microbatches={count} does not divide the {total} micro-batches of a step "
                f"(batch.global_batch={job.batch.global_batch}, micro_batch={job.batch.micro_batch}); "
                f"use one of {divisors_text(total, near=count)}"
            )
        if self.schedule.accepts(count, job.world_size):
            return
        need = self.schedule.needs(job.world_size)
        field = "batch.micro_batch" if self.microbatches is None else "microbatches"
        raise SpecError(
            f"{field}={job.batch.micro_batch if self.microbatches is None else count} makes {count} micro-batches "
            f"a pass, but the {self.schedule.name} schedule on {job.world_size} ranks needs {need}; "
            f"use {self._way_out(job)}"
        )

    def _check_order(self, job: Job) -> None:
        """Check the order of operations if torch lacks the schedule; very long ones are checked only by the ranks."""
        count = self.microbatches or job.num_micro_batches
        if self.schedule.torch_class is None and count * job.world_size <= _MOST_CHECKED:
            from shardscope.analytic.schedules import build

            build(self.schedule, job.world_size, count, self.stages_per_rank)

    def _way_out(self, job: Job) -> str:
        """Return settings for an error message, with the largest micro-batch that the schedule accepts."""
        size = job.batch.global_batch
        fitting = self._fitting_micro_batches(size, job.world_size)
        if not fitting:
            return f"batch.global_batch={2 * job.world_size} or more"
        count = size // fitting[0]
        more = "" if self.microbatches is None else f" with microbatches={count}"
        return f"batch.micro_batch={fitting[0]}{more} ({count} micro-batches)"

    def _check_layers(self, job: Job) -> None:
        stages = job.world_size * self.stages_per_rank
        if isinstance(self.split, tuple) and (len(self.split) != stages or min(self.split, default=0) < 1):
            raise SpecError(
                f"split={self.split} names {len(self.split)} stages, but world_size={job.world_size} times "
                f"{self.stages_per_rank} stages a rank are {stages}; give {stages} numbers of at least 1"
            )
        if isinstance(job.model, str):
            check_split(
                self.split, model_config(job.model).num_layers_in_order, stages, of=f"model={job.model!r}"
            )

    @property
    def ranks_meet(self) -> bool:
        """False, because stages send only to their neighbours, each at its own time."""
        return False

    def split_of(self, trace: StepTrace, job: Job) -> tuple[int, ...]:
        """Return the number of layers in each stage; FLOPs replace times if the split is by measured time."""
        pieces, num_stages = trace.pieces, job.world_size * self.stages_per_rank
        if isinstance(self.split, tuple):
            return self.split
        if self.split == "even":
            return even_split(len(pieces), num_stages)
        if self.split == "time":
            return optimal_split([piece.flops for piece in pieces], num_stages)
        size, copies = job.element_bytes, 2 + job.optimizer.states.tensors
        rows, samples = trace.parameters, job.batch.per_rank(1) // job.num_micro_batches
        states = [
            size * sum(rows[p].num_elements * (copies if rows[p].is_trained else 1) for p in piece.parameters)
            for piece in pieces
        ]
        stored = [piece.stored_bytes * samples for piece in pieces]
        return optimal_split([a + b for a, b in zip(states, stored, strict=True)], num_stages)

    def stages(self, step: JobStep) -> list[tuple[int, Sequence[PipelinePiece]]]:
        """Return the rank and the layers of each stage, in stage order."""
        ends = accumulate(self.split_of(step.trace, step.job))
        pieces, ranks = step.trace.pieces, self.stage_ranks(step.world_size)
        return [(rank, pieces[a:b]) for rank, (a, b) in zip(ranks, pairwise([0, *ends]), strict=True)]

    def _table(self, step: JobStep) -> ScheduleTable | None:
        """Return the schedule table of one pass; None if it would have too many operations."""
        from shardscope.analytic.schedules import build

        count = self.microbatches or step.micro_batches
        if count * step.world_size * self.stages_per_rank > _MOST_LISTED:
            return None
        return build(self.schedule, step.world_size, count, self.stages_per_rank)

    def activations(self, step: JobStep) -> list[float] | None:
        """Return the peak activation bytes of each rank: those saved by all micro-batches in flight, and by the loss.

        This is an upper bound if blocks are recomputed, or if the backward pass is split, because the first part of a
        split backward pass frees some activations.
        """
        table = self._table(step)
        if not step.trace.pieces or table is None:
            return None
        stages = [
            step.samples * sum(piece.stored_bytes for piece in pieces) for _, pieces in self.stages(step)
        ]
        stages[-1] += step.samples * step.trace.loss_bytes
        return list(table.peak_activation(stage_sizes=stages))

    def work(self, step: JobStep) -> list[Work]:
        """Return the work of each rank: its share of all FLOPs, and the bubble, neglected for huge schedules."""
        if not step.trace.pieces:
            return [Work(1.0 / step.world_size)] * step.world_size
        flops = [0.0] * step.world_size
        for rank, pieces in self.stages(step):
            flops[rank] += sum(piece.flops for piece in pieces)
        table = self._table(step)
        bubble = 0.0 if table is None else table.bubble_fraction
        shares = [each / sum(flops) for each in flops]
        return [Work(share, share * bubble / (1.0 - bubble)) for share in shares]

    def traffic(self, step: JobStep) -> Traffic | None:
        """Return the traffic of activations and their gradients, of gradients of tied parameters, and of norms.

        This is an estimate if layers are split by measured time and their outputs differ in size.
        """
        from shardscope.analytic.communication.pipeline import pipeline_traffic, tied_traffic
        from shardscope.analytic.communication.traffic import together
        from shardscope.methods.strategies.sharded import norm_traffic

        job, pieces, ranks = step.job, step.trace.pieces, self.stage_ranks(step.world_size)
        if not pieces:
            return None
        samples = job.batch.per_rank(1) // step.micro_batches
        ends = list(accumulate(self.split_of(step.trace, job)))
        handed_on = [int(pieces[end - 1].output_bytes * samples) for end in ends[:-1]]
        sizes = [int(piece.output_bytes * samples) for piece in pieces[:-1]]
        is_known = self.split != "time" or min(sizes) == max(sizes)
        crossing = pipeline_traffic(
            handed_on, ranks, step.micro_batches, bounds=None if is_known else (min(sizes), max(sizes))
        )
        holders: dict[int, set[int]] = {}
        for rank, held in self.stages(step):
            for place in (place for piece in held for place in piece.parameters):
                holders.setdefault(place, set()).add(rank)
        rows = step.trace.parameters
        tied = [
            tied_traffic(rows[place].num_elements, step.element_bytes, sorted(by), step.world_size)
            for place, by in holders.items()
            if len(by) > 1 and rows[place].is_trained
        ]
        return together([crossing, *tied, *norm_traffic(step, of_layers=False)])

    def states(self, step: JobStep) -> RankStates | None:
        """Return the bytes of the states of each rank's own layers; a tied parameter is on every rank that uses it.

        This is an estimate if layers are split by measured time.
        """
        from shardscope.analytic.memory.stages import pipeline_states

        if not step.trace.pieces:
            return None
        found = pipeline_states(step, self.stages(step))
        return found._replace(is_exact=found.is_exact and self.split != "time")

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.pipeline._torch import PipelineRank

        return PipelineRank(job, context)


def check_split(split: str | tuple[int, ...], num_layers: int, num_stages: int, *, of: str) -> None:
    """Refuse a split that does not fit the number of layers.

    Args:
        split: A value of `Pipeline.split`.
        num_layers: Number of layers in the model.
        num_stages: Number of stages on all ranks.
        of: Description of the model, for the error message.

    Raises:
        SpecError: There are fewer layers than stages, or an explicit split does not add up to the number of layers.
    """
    require_enough_layers(num_layers, num_stages)
    if isinstance(split, tuple) and sum(split) != num_layers:
        raise SpecError(
            f"split={split} adds up to {sum(split)} layers, but {of} has {num_layers} layers to cut; "
            f"make the numbers add up to {num_layers}"
        )
