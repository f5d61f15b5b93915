"""Pipeline parallelism: each rank has some of the layers, and micro-batches flow through all ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from shardscope.errors import SpecError, unknown_name
from shardscope.spec.bounded_partition import MemoryBound, bounded_split
from shardscope.spec.divisors import divisors, divisors_text
from shardscope.spec.look import Arrangement, MethodStyle
from shardscope.spec.models import model_config
from shardscope.spec.numbers import Count, CountOrZero
from shardscope.spec.partition import even_split, optimal_split, require_enough_layers
from shardscope.spec.pipeline_schedule import AnyPipelineSchedule, PipelineSchedule
from shardscope.spec.strategy import Strategy, Work
from shardscope.spec.units import Bytes, plural

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import StepPlan
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.analytic.memory.in_flight import StageSaved
    from shardscope.analytic.schedules.stage_passes import StagePass
    from shardscope.analytic.schedules.table import ScheduleTable
    from shardscope.spec.job import Job
    from shardscope.spec.model.step import PipelinePiece

_MOST_LISTED = 1 << 16
"""Maximum number of operations in a schedule table that is built for a prediction."""
_MOST_CHECKED = 4096
"""Largest product of micro-batches and ranks for which the order of operations is checked before a launch."""


_MEASURED = ("time", "speed")
SPLITS = (*_MEASURED, "memory", "even")


def _check_split(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(
        r"\s*\d+(\s*,\s*\d+)+\s*", value
    ):  # as in a form or on a command line
        return tuple(map(int, value.split(",")))
    if not isinstance(value, list | tuple) and value not in SPLITS:
        named = unknown_name("split", value, SPLITS)
        raise SpecError(f"{named}, or a tuple with the number of layers in each stage, such as (2, 1)")
    return value


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
    """Schedule, which determines the order of forward and backward passes: a `PipelineSchedule` or its name."""
    virtual_stages: int | None = Field(default=None, ge=1, le=64)
    """Number of stages on each rank; None means the schedule's default."""
    microbatches: Count | None = None
    """Number of micro-batches in one pass through the pipeline; None means all micro-batches of a step. If a step has
    more, it takes several passes."""
    split: Annotated[
        Literal["time", "speed", "memory", "even"] | tuple[CountOrZero, ...], BeforeValidator(_check_split)
    ] = "time"
    """How layers are split into stages: by time as measured on rank 0, by time on each stage's own device (``speed``,
    for devices of different speeds), by memory, evenly by number, or explicitly, with a tuple that gives the number of
    layers in each stage."""
    memory_bound: Bytes | tuple[Bytes, ...] | None = None
    """Most bytes of parameters, gradients, optimizer states and saved activations on a rank, for a split by time or
    speed: one number, or one for each rank. The loss's own activations are not counted; a tied parameter counts in
    each layer. None for no bound."""

    @model_validator(mode="after")
    def _check_bound(self) -> Self:
        if self.memory_bound is not None and not self.is_measured:
            raise SpecError(
                f"memory_bound has no effect on split={self.split!r}, which does not depend on time; use split='time' "
                "or 'speed', or leave memory_bound out"
            )
        return self

    @model_validator(mode="after")
    def _check_stages_per_rank(self) -> Self:
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
        return {
            "pipeline": world_size,
            "schedule": self.schedule.name,
            "virtual_stages": self.stages_per_rank if world_size > 1 else 1,
        }

    def num_data_ranks(self, world_size: int) -> int:
        """Return 1, because all ranks work on the same batch."""
        return 1

    def stage_ranks(self, world_size: int) -> tuple[int, ...]:
        """Return the rank that holds each stage, in stage order."""
        return self.schedule.stage_ranks(world_size, self.stages_per_rank)

    def role(self, rank: int, world_size: int) -> str:
        """Return the stages of a rank as text, such as ``stage 2`` or ``stages 1 and 6``."""
        held = [str(stage) for stage, at in enumerate(self.stage_ranks(world_size)) if at == rank]
        if len(held) == 1:
            return f"stage {held[0]}"
        return f"stages {', '.join(held[:-1])} and {held[-1]}"

    def passes(self, num_micro_batches: int) -> int:
        """Return the number of passes through the pipeline in a step with `num_micro_batches` micro-batches."""
        return num_micro_batches // (self.microbatches or num_micro_batches)

    def suggested_micro_batch(self, global_batch: int, world_size: int) -> int | None:
        """Return the largest valid micro-batch size, if possible one with at least two micro-batches per rank."""
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

    @property
    def needs_even_because(self) -> str:
        """Why the batch cannot be divided unevenly."""
        return "all ranks work on the whole batch (split='speed' gives fast ranks more layers)"

    def check(self, job: Job) -> None:
        """Reject a job that the pipeline cannot run.

        The schedule must be able to run the number of micro-batches without a deadlock, the model must have at least
        as many layers as there are stages, and an explicit split must match the stages and the layers.

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
            f"per pass, but the {self.schedule.name} schedule on {job.world_size} ranks needs {need}; "
            f"use {self._way_out(job)}"
        )

    def _check_order(self, job: Job) -> None:
        """Check the order of operations of a schedule that torch does not have; the ranks alone check very
        long orders.
        """
        count = self.microbatches or job.num_micro_batches
        if self.schedule.torch_class is None and count * job.world_size <= _MOST_CHECKED:
            from shardscope.analytic.schedules import build

            build(self.schedule, job.world_size, count, self.stages_per_rank)

    def _way_out(self, job: Job) -> str:
        """Return settings for an error message to suggest, with the largest micro-batch that the schedule accepts."""
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
                f"split={self.split} has {len(self.split)} numbers, but world_size={job.world_size} with "
                f"virtual_stages={self.stages_per_rank} makes {stages} stages; give {stages} numbers of at least 1"
            )
        if isinstance(self.memory_bound, tuple) and len(self.memory_bound) != job.world_size:
            raise SpecError(
                f"memory_bound has {plural(len(self.memory_bound), 'number')} for world_size={job.world_size}; "
                "give one number for each rank, or a single one for all"
            )
        if isinstance(job.model, str):
            self.check_depth(
                model_config(job.model).num_layers_in_order, job.world_size, of=f"model={job.model!r}"
            )

    def check_depth(self, num_layers: int, world_size: int, *, of: str) -> None:
        """Reject a model that cannot be split among this number of ranks; `of` describes it for the message.

        Raises:
            SpecError: There are fewer layers than stages, or an explicit split does not add up to `num_layers`.
        """
        check_split(self.split, num_layers, world_size * self.stages_per_rank, of=of)

    @property
    def is_measured(self) -> bool:
        """Whether the split is known only after the ranks have measured times."""
        return self.split in _MEASURED

    def split_of(self, step: JobStep) -> tuple[int, ...]:
        """Return the predicted number of layers in each stage; a split by time is predicted from FLOPs."""
        job, pieces = step.job, step.trace.pieces
        if isinstance(self.split, tuple):
            return self.split
        if self.split == "even":
            return even_split(len(pieces), job.world_size * self.stages_per_rank)
        size, copies, rows = job.element_bytes, 2 + job.optimizer.states.tensors, step.trace.parameters
        samples = job.batch.per_rank(1) // job.num_micro_batches
        states = [
            size * sum(rows[p].num_elements * (copies if rows[p].is_trained else 1) for p in piece.parameters)
            for piece in pieces
        ]
        return self.cut(
            job,
            [piece.flops for piece in pieces],
            step.slowness if self.split == "speed" else (),
            states=states,
            saved=[piece.stored_bytes * samples for piece in pieces],
        )

    def cut(
        self,
        job: Job,
        times: Sequence[float],
        slowness: Sequence[float],
        *,
        states: Sequence[float],
        saved: Sequence[float],
    ) -> tuple[int, ...]:
        """Return the number of layers in each stage by the costs of layers, for a split by time, speed or memory.

        Args:
            job: The job.
            times: Time of each layer, in any unit.
            slowness: Factor of all times on each rank; empty if all devices are equal.
            states: Bytes of each layer's parameters, gradients and optimizer states.
            saved: Bytes that each layer saves for the backward pass of one micro-batch.

        Raises:
            SpecError: No split fits `memory_bound`.
        """
        ranks = self.stage_ranks(job.world_size)
        if self.split == "memory":
            return optimal_split([a + b for a, b in zip(states, saved, strict=True)], len(ranks))
        slow = [slowness[rank] for rank in ranks] if slowness else None
        if self.memory_bound is None:
            return optimal_split(times, len(ranks), slowness=slow)
        each = self.memory_bound
        bytes_by_rank = each if isinstance(each, tuple) else (each,) * job.world_size
        bound = MemoryBound(bytes_by_rank, ranks, self._in_flight(job), states, saved)
        return bounded_split(times, bound, slowness=slow)

    def _in_flight(self, job: Job) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return how many micro-batches each rank's stages hold at the same time; see `ScheduleTable.held_together`."""
        from shardscope.analytic.schedules import build

        count = self.microbatches or job.num_micro_batches
        if count * job.world_size * self.stages_per_rank > _MOST_LISTED:
            raise SpecError(
                f"memory_bound needs the schedule's operations, which are too many with {count} micro-batches in a "
                "pass; set microbatches, or leave memory_bound out"
            )
        return build(self.schedule, job.world_size, count, self.stages_per_rank).held_together()

    def stages(self, step: JobStep) -> list[tuple[int, Sequence[PipelinePiece]]]:
        """Return the rank and the layers of each stage, in stage order.

        Raises:
            SpecError: The schedule splits backward passes, and PyTorch cannot split that of a layer, or of a stage in
                which several layers use one parameter.
        """
        ends = [*accumulate(self.split_of(step))]
        pieces, ranks = step.trace.pieces, self.stage_ranks(step.world_size)
        for place in range(ends[0], len(pieces)) if self.schedule.splits_backward else ():
            mode = step.job.recompute
            if mode not in pieces[place].split:
                reason = pieces[place].not_split.get(mode, "it was not traced")
                raise not_split(self.schedule, f"layer {place + 1} of {len(pieces)}", reason)
        found = [pieces[a:b] for a, b in pairwise([0, *ends])]
        for stage in range(1, len(found)) if self.schedule.splits_backward else ():
            used = [place for piece in found[stage] for place in piece.parameters]
            if any(
                step.trace.parameters[place].is_trained for place, count in Counter(used).items() if count > 1
            ):
                reason = "several of its layers share a weight"
                raise not_split(self.schedule, f"stage {stage + 1} of {len(found)}", reason)
        return [*zip(ranks, found, strict=True)]

    def _table(self, step: JobStep) -> ScheduleTable | None:
        """Return the schedule table of one pass; None if it would have too many operations."""
        from shardscope.analytic.schedules import build

        count = self.microbatches or step.micro_batches
        if count * step.world_size * self.stages_per_rank > _MOST_LISTED:
            return None
        return build(self.schedule, step.world_size, count, self.stages_per_rank)

    def passes_of_stages(self, micro_batches: int, world_size: int) -> list[tuple[StagePass, ...]]:
        """Return the passes of each stage in a step, in order."""
        from shardscope.analytic.schedules import build
        from shardscope.analytic.schedules.stage_passes import stage_passes

        count = self.microbatches or micro_batches
        table = build(self.schedule, world_size, count, self.stages_per_rank)
        return stage_passes(table, self.passes(micro_batches))

    def recomputations(self, step: JobStep) -> float:
        """Return how often a layer is recomputed for one micro-batch, as a mean over all FLOPs; see `stage_passes`."""
        table = self._table(step) if self.schedule.splits_backward and step.trace.pieces else None
        if table is None:
            return 1.0
        flops = self._stage_costs(step)
        again = sum(flops[op.stage] for op in table.ops if op.op == "W" and op.stage)
        return 1.0 + again / sum(flops[op.stage] for op in table.ops if op.op == "F")

    def activations(self, step: JobStep) -> list[float] | None:
        """Return the peak activation bytes of each rank, saved by all micro-batches in flight and by the loss."""
        from shardscope.analytic.memory.in_flight import saved_in_flight

        table = self._table(step)
        if not step.trace.pieces or table is None:
            return None
        return [max(held for _, held in row) for row in saved_in_flight(table, self._saved(step))]

    def _saved(self, step: JobStep) -> list[StageSaved]:
        """Return what each stage saves for the backward pass of one micro-batch."""
        from shardscope.analytic.memory.in_flight import stage_saved

        stages = self.stages(step)
        return [
            stage_saved(
                pieces, step.job.recompute, samples=step.samples,
                loss_bytes=step.trace.loss_bytes * (stage == len(stages)),
            )
            for stage, (_, pieces) in enumerate(stages, 1)
        ]  # fmt: skip

    def work(self, step: JobStep) -> list[Work]:
        """Return the work of each rank: its fraction of all FLOPs, and the bubble (0 for very long schedules).

        With stages of unequal FLOPs or different devices, the bubble includes waiting for slower stages. A rank that
        finishes its passes early starts the next step, unless ranks synchronise at the end of a step. So the step time
        is the longest time on any rank from its first pass to its last, and ZB-H2 has no bubble.
        """
        if not step.trace.pieces:
            return [Work(step.slow(rank) / step.world_size) for rank in range(step.world_size)]
        flops, shares = self._stage_costs(step), [0.0] * step.world_size
        ranks = self.stage_ranks(step.world_size)
        costs = [each * step.slow(rank) for rank, each in zip(ranks, flops, strict=True)]
        for rank, cost in zip(ranks, costs, strict=True):
            shares[rank] += cost / (sum(flops) - sum(step.extra_flops))
        table = self._table(step)
        if table is None:
            return [Work(share) for share in shares]
        timeline = table.timeline(stage_cost=costs)
        spans = [row[-1].end - row[0].start for row in timeline.rows]
        seconds = timeline.end if self._ranks_meet_after(step) else max(spans)
        busy = step.world_size * (1.0 - timeline.bubble_fraction) * timeline.end
        whole = seconds / busy * sum(shares)
        return [Work(share, max(0.0, whole - share)) for share in shares]

    def _ranks_meet_after(self, step: JobStep) -> bool:
        """Return whether ranks exchange gradients of tied parameters, or norms, after the last pass of a step."""
        from shardscope.methods.strategies.sharded import norm_traffic

        return bool(self._tied(step)) or any(norm_traffic(step, of_layers=False))

    def _stage_costs(self, step: JobStep) -> list[float]:
        """Return the FLOPs of each stage, with those of its fullest experts; 1 for every stage if all have 0 FLOPs."""
        extra = iter(step.extra_flops or [0.0] * len(step.trace.pieces))
        flops = [sum(piece.flops + next(extra) for piece in pieces) for _, pieces in self.stages(step)]
        return flops if any(flops) else [1.0] * len(flops)

    def traffic(self, step: JobStep) -> Traffic | None:
        """Return the traffic of activations, their gradients, the gradients of tied parameters, and norms.

        The result is an estimate if layers are split by measured time and their outputs differ in size.
        """
        from shardscope.analytic.communication.pipeline import pipeline_traffic, tied_traffic
        from shardscope.analytic.communication.traffic import together
        from shardscope.methods.strategies.sharded import norm_traffic

        pieces, ranks = step.trace.pieces, self.stage_ranks(step.world_size)
        if not pieces:
            return None
        sizes, handed_on = self._output_bytes(step)
        is_known = not self.is_measured or min(sizes) == max(sizes)
        crossing = pipeline_traffic(
            handed_on, ranks, step.micro_batches, bounds=None if is_known else (min(sizes), max(sizes))
        )
        tied = [
            tied_traffic(count, step.element_bytes, holders, step.world_size)
            for count, holders in self._tied(step)
        ]
        return together([crossing, *tied, *norm_traffic(step, of_layers=False)])

    def _output_bytes(self, step: JobStep) -> tuple[list[int], list[int]]:
        """Return the output bytes of one micro-batch for each layer but the last, and for each stage but the last."""
        pieces, samples = step.trace.pieces, step.job.batch.per_rank(1) // step.micro_batches
        sizes = [int(piece.output_bytes * samples) for piece in pieces[:-1]]
        ends = list(accumulate(self.split_of(step)))
        return sizes, [sizes[end - 1] for end in ends[:-1]]

    def _tied(self, step: JobStep) -> list[tuple[int, list[int]]]:
        """Return the number of elements of each trained parameter that several ranks hold, and these ranks."""
        holders: dict[int, set[int]] = {}
        for rank, held in self.stages(step):
            for place in (place for piece in held for place in piece.parameters):
                holders.setdefault(place, set()).add(rank)
        rows = step.trace.parameters
        return [
            (rows[place].num_elements, sorted(by))
            for place, by in holders.items()
            if len(by) > 1 and rows[place].is_trained
        ]

    def plan(self, step: JobStep) -> StepPlan | None:
        """Return the schedule with the messages between stages; all-reduces of tied gradients and of norms follow."""
        from shardscope.analytic.communication.plan import (
            Exchange,
            Flow,
            StepPlan,
            When,
            in_groups,
            ring_rounds,
            whole,
        )
        from shardscope.methods.strategies.sharded import norm_traffic

        table = self._table(step) if step.trace.pieces else None
        if table is None:
            return None
        end, size = When("backward"), step.element_bytes
        tied = [
            Exchange(
                "ring_all_reduce",
                end,
                in_groups(ring_rounds("all_reduce", count, size, len(holders)), [tuple(holders)]),
            )
            for count, holders in self._tied(step)
        ]
        norms = [each for part in norm_traffic(step, of_layers=False) for each in whole(part, end)]
        passes = self.passes(step.micro_batches)
        flow = Flow(
            table, passes, tuple(self._output_bytes(step)[1]), tuple(self._saved(step)),
            tuple(self._stage_costs(step)), ranks_meet=self._ranks_meet_after(step),
        )  # fmt: skip
        return StepPlan((*tied, *norms), flow)

    def pipeline_step(self, step: JobStep) -> JobStep:
        """Return the step itself: every rank has other layers."""
        return step

    def arrangement(self, world_size: int) -> Arrangement:
        """Return a row of stages."""
        return Arrangement("row")

    def states(self, step: JobStep) -> RankStates | None:
        """Return the bytes of model states on each rank: the states of its layers, including copies of tied parameters.

        The result is an estimate if layers are split by measured time.
        """
        from shardscope.analytic.memory.stages import pipeline_states

        if not step.trace.pieces:
            return None
        found = pipeline_states(step, self.stages(step))
        return found._replace(is_exact=found.is_exact and not self.is_measured)

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.pipeline._torch import PipelineRank

        return PipelineRank(job, context)


def with_split(job: Job, split: Sequence[int]) -> Job:
    """Return a job with the split that its ranks measured; the job itself if its split is not measured.

    Args:
        job: A job with any strategy.
        split: Number of layers in each stage, as recorded; empty if unknown.
    """
    pipeline = job.strategy
    if not isinstance(pipeline, Pipeline) or pipeline.split not in _MEASURED:
        return job
    if len(split) != job.world_size * pipeline.stages_per_rank:  # unknown, or on another number of ranks
        return job
    return job.replace(strategy=pipeline.replace(split=tuple(split), memory_bound=None))


def check_split(split: str | tuple[int, ...], num_layers: int, num_stages: int, *, of: str) -> None:
    """Reject a split that does not fit the number of layers.

    Args:
        split: A value of `Pipeline.split`.
        num_layers: Number of layers in the model.
        num_stages: Number of stages on all ranks.
        of: Description of the model for the error message, such as ``model='mlp'``.

    Raises:
        SpecError: There are fewer layers than stages, or an explicit split does not add up to the number of layers.
    """
    require_enough_layers(num_layers, num_stages)
    if isinstance(split, tuple) and sum(split) != num_layers:
        raise SpecError(
            f"split={split} adds up to {sum(split)} layers, but {of} has {num_layers} layers; "
            f"make the numbers add up to {num_layers}"
        )


def not_split(schedule: PipelineSchedule, what: str, reason: str) -> SpecError:
    """Return the error that PyTorch cannot split the backward pass of a layer or stage."""
    return SpecError(
        f"schedule={schedule.name!r} splits the backward pass of all stages but the first, and PyTorch cannot split "
        f"that of {what} ({reason}); use a schedule such as '1f1b'"
    )
