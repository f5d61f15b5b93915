"""Several axes of parallelism at once: data, tensor, pipeline, context and expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from shardscope.errors import SpecError, quoted
from shardscope.methods.strategies.mesh import (
    context_axis,
    expert_axis,
    pipeline_axis,
    pipeline_predictions,
    tensor_axis,
)
from shardscope.runlog.axes import EXPERT_DATA, axis_groups, axis_of, collective_of
from shardscope.spec.compression import Carriage
from shardscope.spec.context_comm import ContextComm
from shardscope.spec.divisors import divisors_text
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import Count
from shardscope.spec.strategy import AnyStrategy, Strategy, Work, strategies_where
from shardscope.spec.tensor_plan import TensorPlan

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import StepPlan, When
    from shardscope.analytic.communication.traffic import Sent
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.spec.job import Job


class Mesh(Strategy):
    """Divides each replica of the model over a group of ranks, and the batch over the groups.

    The ranks form a mesh. The tensor axis is the innermost one, then follow the context, data and pipeline axes, as in
    the layouts of `predict` and `plan`. Along the data axis, `data` is the same strategy as in a
    job with this axis only. Along the tensor axis, the model's layers are divided by columns and rows (Shoeybi et al.,
    arXiv 1909.08053): each rank computes with its part of a layer's weights, and ranks sum activations, and gradients
    of activations, in each pass. Along the context axis, every sequence is divided, and ranks exchange what attention
    needs, as `context_comm` says; they exchange gradients, and share states, with the ranks of the data axis. Along the
    pipeline axis, each rank has some of the layers, as with the strategy `stages`.

    Example:
        >>> Strategy("mesh", data="zero-1", tensor=2).num_data_ranks(8)
        4
    """

    name = "mesh"
    family = "Several axes"
    look = MethodStyle("#7a8b1f", "dashdot", "cross")
    carries = frozenset(get_args(Carriage))
    has_exchanges = True
    is_composite: ClassVar[bool] = True

    data: AnyStrategy = Field(default_factory=lambda: Strategy("ring"))
    """Strategy of the data axis: one whose ranks all apply the same mean gradient. It has no effect if there is one
    replica; ``single`` is then also allowed."""
    tensor: Count = 1
    """Number of ranks over which each layer is divided; must divide `world_size`."""
    context: Count = 1
    """Number of ranks over which every sequence is divided."""
    context_comm: ContextComm = "all-gather"
    """How attention communicates along the context axis: ``all-gather`` of keys and values, keys and values around a
    ``ring``, or ``ulysses``, all-to-alls that divide the heads, which needs a multiple of `context` heads."""
    sequence_parallel: bool = False
    """Divide the activations between divided layers over the tensor ranks, along the sequence."""
    tensor_plan: Annotated[TensorPlan | None, BeforeValidator(TensorPlan.resolve)] = None
    """Which layers are divided, by name; None uses the plan of the model's own method `tensor_plan`."""
    expert: Count = 1
    """Number of data and context ranks over which the experts of a model are distributed; must divide the number of
    these ranks and of experts. Ranks send tokens to each other's experts; the gradients of an expert are averaged, and
    with ZeRO its states shared, over the ranks that hold it, and all others over all data and context ranks."""
    pipeline: Count = 1
    """Number of ranks over which the layers of one replica are spread; must divide `world_size`."""
    stages: AnyStrategy = Field(default_factory=lambda: Strategy("pipeline"))
    """Settings of the pipeline axis, such as ``ss.Pipeline(schedule="zbv")``; no effect if `pipeline` is 1."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.stages.is_here and "pipeline" not in (self.stages.degrees(2) or {}):
            raise SpecError(
                f"strategy.stages={quoted(self.stages.label)} does not spread layers over ranks; use ss.Pipeline(...)"
            )
        return self

    def shape(self, world_size: int) -> dict[str, int]:
        """Return the number of ranks along each axis, the outermost axis first."""
        context = {"context": self.context} if self.context > 1 else {}
        data = self.num_data_ranks(world_size)
        return {"pipeline": self.pipeline, "data": data, **context, "tensor": self.tensor}

    def place(self, rank: int, world_size: int) -> dict[str, int]:
        """Return a rank's index on each axis, the outermost axis first."""
        place, rest = {}, rank
        for axis, size in reversed(self.shape(world_size).items()):
            place[axis], rest = rest % size, rest // size
        return dict(reversed(place.items()))

    def groups(self, axis: str, world_size: int) -> list[list[int]]:
        """Return the groups of ranks along an axis, which may be one of experts, within the data axis."""
        is_of_experts = axis in ("expert", EXPERT_DATA)
        shape = expert_axis.shape(self, world_size) if is_of_experts else self.shape(world_size)
        return axis_groups(shape, axis)

    def num_data_ranks(self, world_size: int) -> int:
        """Return the number of replicas, each of which gets its share of the batch."""
        return max(world_size // self.replica_ranks, 1)

    @property
    def replica_ranks(self) -> int:
        """Number of ranks that train one replica of the model, each with a part of it or of its sequences."""
        return self.tensor * self.pipeline * self.context

    def num_state_ranks(self, world_size: int) -> int:
        """Return the number of ranks that have the same part of the model, on the data and context axes."""
        return self.num_data_ranks(world_size) * self.context

    def data_job(self, job: Job) -> Job:
        """Return the job of the ranks along the data axis, which includes the context axis.

        It is the same job, in which the part of a sample on a context rank counts as a sample.
        """
        ranks = self.num_state_ranks(job.world_size)
        strategy = self.data if ranks > 1 else Strategy("single")
        batch = job.batch.replace(
            global_batch=job.batch.global_batch * self.context, shares=None, rebalance_every=None
        )
        return job.replace(
            strategy=strategy,
            world_size=ranks,
            elastic=None,
            **({"batch": batch} if self.context > 1 else {}),
        )

    def pipeline_job(self, job: Job) -> Job:
        """Return the job of the ranks along the pipeline axis: that of one replica, with its share of the batch."""
        share = job.batch.per_rank(job.num_data_ranks)
        return job.replace(
            strategy=self.stages, world_size=self.pipeline, elastic=None, compression="none",
            batch=job.batch.replace(global_batch=share, shares=None, rebalance_every=None),
        )  # fmt: skip

    def suggested_micro_batch(self, global_batch: int, world_size: int) -> int | None:
        """Return the size that the pipeline suggests for a replica's share; None without a pipeline."""
        share = global_batch // self.num_data_ranks(world_size)
        return (
            self.stages.suggested_micro_batch(share, self.pipeline) if self.pipeline > 1 and share else None
        )

    @property
    def of_data(self) -> Strategy:
        """The strategy of the data axis."""
        return self.data

    def data_index(self, rank: int, world_size: int) -> int:
        """Return a rank's place among the ranks that have the same part of the model."""
        place = self.place(rank, world_size)
        return place["data"] * self.context + place.get("context", 0)

    def of_replica(self, world_size: int) -> tuple[Strategy, int]:
        """Return a mesh of the tensor, context and expert axes only, and its number of ranks; `Single` with one
        rank.
        """
        ranks = self.tensor * self.context * self.expert
        if ranks == 1:
            return Strategy("single"), 1
        one = self.replace(data=Strategy("ring"), pipeline=1, stages=Strategy("pipeline"))
        return one, ranks

    def role(self, rank: int, world_size: int) -> str:
        """Return a rank's place on each axis, such as ``data 0 · tensor 1``, and its stages, if there are several."""
        place = self.place(rank, world_size)
        stages = [self.stages.role(place["pipeline"], self.pipeline)] if self.pipeline > 1 else []
        axes = [f"{axis} {index}" for axis, index in place.items() if axis != "pipeline"]
        return " · ".join([*axes, *map(str, stages)])

    def cargo(self, collective: str) -> str:
        """Return the word for what a collective sends: activations on the tensor and context axes."""
        axis, name = axis_of(collective), collective_of(collective)
        if axis in ("tensor", "context", "expert"):
            return "activations"
        return (self.stages if axis == "pipeline" else self.data).cargo(name)

    @property
    def label(self) -> str:
        """The data axis's strategy and the other axes' numbers of ranks, such as ``zero-1+tensor2+context2-ring``."""
        comm = "" if self.context_comm == "all-gather" else f"-{self.context_comm}"
        axes = {"tensor": "", "context": comm, "expert": "", "pipeline": ""}
        names = [f"{axis}{getattr(self, axis)}{how}" for axis, how in axes.items() if getattr(self, axis) > 1]
        return "+".join([self.data.label, *(names or ["tensor1"]), *["sequence"] * self.sequence_parallel])

    @property
    def zero_stage(self) -> int | None:  # type: ignore[override] # that of the strategy in a setting
        """The ZeRO stage of the data axis."""
        return self.data.zero_stage

    @property
    def held_stage(self) -> int | None:
        """The ZeRO stage that describes a rank's memory during a step."""
        return self.data.held_stage

    @property
    def differs_because(self) -> str | None:
        """Clause that says why final parameters may differ from those of a single process; None if they cannot."""
        return self.data.differs_because

    @property
    def hides_noise_because(self) -> str | None:
        """Why the gradient noise scale cannot be measured: no rank has the whole gradient of its samples."""
        is_whole = self.replica_ranks == 1 and self.expert == 1
        return self.data.hides_noise_because if is_whole else "a rank has a part of its samples' gradient"

    @property
    def needs_even_because(self) -> str | None:
        """Why all replicas need equal shares of the batch."""
        if self.pipeline > 1:
            return "ranks along a pipeline pass the same number of micro-batches in each replica"
        for axis in ("tensor", "context"):
            if getattr(self, axis) > 1:
                return f"ranks of a {axis} group pass through the model together"
        if self.expert > 1:
            return "ranks send tokens to each other's experts in each pass"
        return self.data.needs_even_because

    @property
    def exchanges_in_passes(self) -> bool:
        """Whether ranks communicate in every pass: they do along all axes but the data axis."""
        return self.replica_ranks > 1 or self.expert > 1 or self.data.exchanges_in_passes

    def degrees(self, world_size: int) -> Mapping[str, Any] | None:
        """Return the degrees of the layout: those of each axis, and the schedule of the pipeline."""
        ranks = self.num_state_ranks(world_size)
        data = self.data.degrees(ranks) if ranks > 1 else {}
        if data is None:
            return None
        data = {**data, "data": self.num_data_ranks(world_size), "context": self.context}
        tensor = {"tensor": self.tensor, "sequence_parallel": self.sequence_parallel}
        tensor |= {"expert": self.expert} if self.expert > 1 else {}
        spread = self.stages.degrees(self.pipeline) if self.pipeline > 1 else {}
        return None if spread is None else {**data, **tensor, **spread}

    def check(self, job: Job) -> None:
        """Reject numbers of ranks that do not form a mesh, and combinations of axes that are not available yet."""
        ranks, inner = job.world_size, ""
        for axis in ("tensor", "context", "pipeline"):
            if ranks % (size := getattr(self, axis)):
                raise SpecError(
                    f"strategy.{axis}={size} does not divide world_size={job.world_size}{inner}; use one of "
                    f"{divisors_text(ranks, near=size)}"
                )
            ranks, inner = ranks // size, f"{inner} / {axis}={size}" if size > 1 else inner
        if self.sequence_parallel and self.tensor == 1:
            raise SpecError(
                "strategy.sequence_parallel=True has no effect with tensor=1; use tensor=2 or more, or leave it out"
            )
        if not self.data.is_here:
            return  # a run whose strategy's code is elsewhere can be read, but not launched
        is_alone = self.num_state_ranks(job.world_size) == 1
        if not self.data.composes and not (is_alone and self.data.name == "single"):
            able = ", ".join(strategies_where(lambda strategy: strategy.composes))
            raise SpecError(
                f"strategy.data={quoted(self.data.label)} cannot be the data axis of a mesh, because its ranks do not "
                f"apply the same mean gradient; use one of {able}"
            )
        if is_alone and job.compression.is_on:
            raise SpecError(
                f"compression={job.compression.name!r} needs several ranks on the data axis, and there is one, because "
                f"world_size={job.world_size} is one replica; use compression='none', or "
                f"world_size={2 * self.replica_ranks}"
            )
        if is_alone and self.data.zero_stage:
            raise SpecError(
                f"strategy.data={quoted(self.data.label)} has no other ranks to share states with, because "
                f"world_size={job.world_size} is one replica; leave data out, or use "
                f"world_size={2 * self.replica_ranks}"
            )
        own = {
            "pipeline": pipeline_axis,
            "expert": expert_axis,
            "tensor": tensor_axis,
            "context": context_axis,
        }
        for axis, module in own.items():
            if getattr(self, axis) > 1:
                module.check(self, job)
        self.data_job(job)

    # Each axis by its own formulas

    def pipeline_step(self, step: JobStep) -> JobStep | None:
        """Return the step of the ranks along the pipeline axis, if there is one."""
        return pipeline_predictions.pipeline_step(self, step) if self.pipeline > 1 else None

    def _on_data(self, step: JobStep) -> JobStep:
        """Return the step of the ranks along the data axis: those of a tensor group count as one, the slowest."""
        sums_layers = self.tensor > 1 or self.expert > 1
        return replace(step.in_blocks(self.data_job(step.job), self.tensor), sums_layers=sums_layers)

    def _exchanging(self, step: JobStep) -> dict[str, JobStep]:
        """Return the steps of the ranks that have the same parameters, by axis: those with the same experts, too."""
        data = self._on_data(step)
        return {"data": data} if self.expert == 1 else expert_axis.exchanging(self, step.job, data)

    def traffic(self, step: JobStep) -> Traffic | None:
        """Return the traffic of the data axis's strategy, and that of the collectives within passes, by axis."""
        if self.pipeline > 1:
            return (
                pipeline_predictions.traffic(self, step)
                if pipeline_predictions.is_predictable(self, step)
                else None
            )
        import numpy as np

        from shardscope.analytic.communication.axes import axis_traffic
        from shardscope.analytic.communication.traffic import together

        of_axes = {axis: one.job.strategy.traffic(one) for axis, one in self._exchanging(step).items()}
        if None in of_axes.values() or not self.is_divided(step):
            return None
        of_axes |= {axis: together(each for _, each in calls) for axis, calls in self._calls(step).items()}
        found: dict[str, Sent] = {}
        for axis, traffic in of_axes.items():
            found |= axis_traffic(traffic, axis, np.array(self.groups(axis, step.world_size)))
        return found

    def is_divided(self, step: JobStep) -> bool:
        """Return whether the trace is of a rank's part of the model or of sequences, and not of whole ones."""
        return self.tensor * self.context * self.expert == 1 or step.job.recompute in step.trace.messages

    def _calls(self, step: JobStep) -> dict[str, list[tuple[When, Traffic]]]:
        """Return time and traffic of each collective that passes wait for, by axis."""
        found = {"tensor": tensor_axis.calls(self, step)}
        found |= {"expert": expert_axis.calls(self, step)} if self.expert > 1 else {}
        return {"context": context_axis.calls(self, step), **found} if self.context > 1 else found

    def plan(self, step: JobStep) -> StepPlan | None:
        """Return the messages of the data axis, and those of the other axes; passes wait for the latter."""
        if self.pipeline > 1:
            return (
                pipeline_predictions.plan(self, step)
                if pipeline_predictions.is_predictable(self, step)
                else None
            )
        import numpy as np

        from shardscope.analytic.communication.axes import axis_exchanges
        from shardscope.analytic.communication.plan import whole

        plans = {axis: one.job.strategy.plan(one) for axis, one in self._exchanging(step).items()}
        if None in plans.values() or not self.is_divided(step):
            return None
        of_axes = {axis: plan.exchanges for axis, plan in plans.items()}
        if EXPERT_DATA in of_axes and not self.data.exchanges_in_passes:
            of_axes[EXPERT_DATA] = expert_axis.after_passes(of_axes[EXPERT_DATA])
        for axis, calls in self._calls(step).items():
            of_axes[axis] = [
                replace(each, blocks=True) for when, traffic in calls for each in whole(traffic, when)
            ]
        if self.expert > 1:
            of_axes["expert"] = expert_axis.exchanges(self, step)
        exchanges = [
            exchange
            for axis, own in of_axes.items()
            for exchange in axis_exchanges(own, axis, np.array(self.groups(axis, step.world_size)))
        ]
        data: StepPlan = plans["data"]
        return data._replace(exchanges=tuple(exchanges))

    def states(self, step: JobStep) -> RankStates | None:
        """Return the data axis's own states of the part of the model that a rank holds."""
        import numpy as np

        from shardscope.analytic.communication.axes import placed
        from shardscope.analytic.memory.held import states_together

        if not self.is_divided(step):
            return None
        if self.pipeline > 1:
            return pipeline_predictions.states(self, step)
        found: list[RankStates] = []
        for axis, one in self._exchanging(step).items():
            groups, states = np.array(self.groups(axis, step.world_size)), one.job.strategy.states(one)
            if states is None:
                return None
            found.append(states.each(lambda column, groups=groups: placed(column, groups)))
        return states_together(found)

    def work(self, step: JobStep) -> list[Work]:
        """Return the work of each rank, relative to its part of the model."""
        one = self._on_data(step) if self.pipeline == 1 else pipeline_predictions.pipeline_step(self, step)
        copies = step.world_size // one.world_size
        work = [each for each in one.job.strategy.work(one) for _ in range(copies)]
        return expert_axis.uneven_work(self, step, work) if step.expert_loads and self.pipeline == 1 else work

    def activations(self, step: JobStep) -> list[float] | None:
        """Return the bytes that each rank saves: those of its stages' micro-batches in flight, in a pipeline."""
        along = self.pipeline_step(step)
        if along is None:
            return super().activations(step)
        saved = self.stages.activations(along)
        return saved and [each for each in saved for _ in range(step.world_size // self.pipeline)]

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.mesh._torch import built

        return built(self, job, context)
