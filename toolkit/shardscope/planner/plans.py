"""The result of a search: a ranked table of layouts, with explanations and reranking by different objectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from shardscope import show
from shardscope.analytic import pareto
from shardscope.analytic.compute.flops import model_flops
from shardscope.analytic.pareto import Indices
from shardscope.analytic.recomputation import layers_of_stage
from shardscope.calibration.software import software_of
from shardscope.errors import SpecError, quoted
from shardscope.planner import explain as explaining
from shardscope.planner.asked import Asked
from shardscope.planner.emulated import EmulatedDevices
from shardscope.planner.filter import problem_with
from shardscope.planner.pools import Pool, layout_at
from shardscope.planner.rank import Floats, Objective, objective_weights, ranking, rounded, scores
from shardscope.planner.setting import SearchSettings, capacity, memory_parts, time_of
from shardscope.planner.shipped import (
    Beyond,
    SoftwareLimits,
    fastest_beyond,
    lacking,
    limited_texts,
    unshipped_texts,
)
from shardscope.planner.table import offload_text, table_of
from shardscope.planner.trainer_config import TrainerConfig, trainer_config
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.step import cut, stage_layers
from shardscope.show import Sentences
from shardscope.spec.layout import Layout, short
from shardscope.spec.partition import even_split
from shardscope.spec.units import gib_text, work_text

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.analytic.layouts import Layouts
    from shardscope.planner.rehearsal import Rehearsal


class PlanRow(NamedTuple):
    """One row of the table."""

    rank: int
    """Position in the ranking, from 1."""
    layout: Layout
    step_time_s: float
    """Step time, in seconds."""
    tokens_per_s: float
    mfu: float
    """Model FLOPs utilization: model FLOPs (3 x forward) divided by the devices' peak FLOPs in one step."""
    memory_bytes: float
    """Highest peak memory of any device, in bytes."""
    headroom_bytes: float
    """Smallest free memory for tensors on any device, in bytes."""
    dollars: float | None
    """Cost of one step, in US dollars; None if the cluster has no price."""
    software: str
    """Software for which the layout is planned; empty if the given calibration names none."""


@dataclass(frozen=True, eq=False)
class Plans:
    """Layouts ranked by an objective, and the number of rejected layouts by reason.

    The search keeps the first `top` Pareto fronts over time and memory (the kept rows), so `by` returns the exact best
    `top` layouts under any other objective without another search. On an emulated cluster, it keeps those whose jobs it
    predicted for its own objective, and `by` ranks only these.

    Example:
        >>> plans = plan(model, cluster)  # doctest: +SKIP
        >>> plans.best.layout, plans.frame, plans.explain(1, 2)  # doctest: +SKIP
    """

    asked: Asked
    global_batch: int
    objective: Objective
    top: int | None
    pools: tuple[Pool, ...]
    rejected: Mapping[str, int]
    """Number of rejected layouts by reason; `REASONS` describes the keys."""
    problem: str = ""
    """Why the table is empty and what to change; an empty string if it has rows."""
    limits: SoftwareLimits | None = None
    """Limits of the search to what the software ships; None if nothing was left out."""
    needs_offload: bool = False
    """Whether no layout fits without offloading tensors to the host."""
    order: Indices = field(init=False, repr=False)
    """Indices of all kept rows, best first."""

    def __post_init__(self) -> None:
        weights = objective_weights(self.objective, has_price=self._price is not None)
        room = capacity(self.pools[0].setting)
        score = scores(weights, self.step_time_s, self.memory_bytes, capacity_bytes=room)
        object.__setattr__(self, "order", ranking(score, self.step_time_s, self.memory_bytes))

    @cached_property
    def setting(self) -> SearchSettings:
        """Model and cluster, and the calibration of the best plan."""
        return self.asked.setting(self[0].layout) if len(self) else self.pools[0].setting

    @property
    def software(self) -> tuple[str, ...]:
        """Names of the software for which layouts are planned; several if each layout suggests its own."""
        return tuple(dict.fromkeys(pool.setting.calibration.software for pool in self.pools))

    @cached_property
    def step_time_s(self) -> Floats:
        """Step time of every kept row, in seconds."""
        return np.concatenate([pool.rows.time_s for pool in self.pools])

    @cached_property
    def memory_bytes(self) -> Floats:
        """Highest peak memory of any device for every kept row, in bytes."""
        return np.concatenate([pool.rows.memory_bytes for pool in self.pools])

    @property
    def headroom_bytes(self) -> Floats:
        """Smallest free memory for tensors on any device for every kept row, in bytes."""
        return np.concatenate([capacity(pool.setting) - pool.rows.memory_bytes for pool in self.pools])

    @property
    def considered(self) -> int:
        """Number of combinations of all axes, including invalid ones."""
        return sum(pool.found.total for pool in self.pools)

    @property
    def valid(self) -> int:
        """Number of valid combinations, whether they fit or not."""
        return sum(pool.found.num_valid for pool in self.pools)

    @property
    def _price(self) -> float | None:
        return self.asked.cluster.price_per_device_hour

    def __len__(self) -> int:
        """Return the number of rows in the table."""
        return len(self.order) if self.top is None else min(self.top, len(self.order))

    @overload
    def __getitem__(self, place: int) -> PlanRow: ...
    @overload
    def __getitem__(self, place: slice) -> list[PlanRow]: ...
    def __getitem__(self, place: int | slice) -> PlanRow | list[PlanRow]:
        """Return the row at an index from 0 (negative indices count from the end), or the rows of a slice."""
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        return self.row(int(self.order[: len(self)][place]), rank=place % max(1, len(self)) + 1)

    def __iter__(self) -> Iterator[PlanRow]:
        return (self[place] for place in range(len(self)))

    def row(self, kept: int, *, rank: int = 0) -> PlanRow:
        """Return the row of the table for an index into the kept rows.

        Args:
            kept: Index into the kept rows.
            rank: Position of the row in the ranking, if known; 0 to look it up.
        """
        time, memory = float(self.step_time_s[kept]), float(self.memory_bytes[kept])
        tokens = self.global_batch * self.asked.model.seq
        rank = rank or int(np.flatnonzero(self.order == kept)[0]) + 1
        (pool, _), layout = self._place(kept), self.layout(kept)
        return PlanRow(
            rank, layout, time, tokens / time, self._mfu(pool.setting, layout, time), memory,
            capacity(pool.setting) - memory, self._dollars(time), pool.setting.calibration.software,
        )  # fmt: skip

    def _mfu(self, setting: SearchSettings, layout: Layout, step_time_s: float) -> float:
        model, cluster, calibration = setting
        if isinstance(cluster, EmulatedDevices):
            from shardscope.planner.jobs import figures_of  # needs psutil, which web pages lack

            return figures_of(setting, layout).mfu
        machine = Machine.of(cluster, calibration, layout.precision)
        flops = float(model_flops(model, self.global_batch))
        return machine.utilization(flops, cluster.num_devices, step_time_s)

    def _dollars(self, step_time_s: float) -> float | None:
        if self._price is None:
            return None
        return step_time_s / 3600 * self.asked.cluster.num_devices * self._price

    @property
    def best(self) -> PlanRow:
        """The best plan, which is the first row.

        Raises:
            SpecError: No layout fits; the message is `problem`.
        """
        if not len(self):
            raise SpecError(self.problem)
        return self[0]

    def layout(self, kept: int) -> Layout:
        """Return the layout at an index into the kept rows."""
        columns = self.layouts([kept])
        return layout_at(columns, 0, self.global_batch)

    def layouts(self, kept: Any) -> Layouts:
        """Return the layouts at indices into the kept rows, all of the same pool."""
        at = np.asarray(kept, np.int64)
        pool, start = self._place(int(at[0]))
        rows = pool.rows.at(at - start)
        return pool.found.layouts(rows.body, rows.way, rows.compression, rows.recompute_layers)

    def _place(self, kept: int) -> tuple[Pool, int]:
        """Return the pool of a kept row, and the index of the pool's first row."""
        start = 0
        for pool in self.pools:
            if kept < start + len(pool.rows.time_s):
                return pool, start
            start += len(pool.rows.time_s)
        raise IndexError(f"row {kept} does not exist; {start} rows are kept")

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The ranked table, one row per plan."""
        return self._frame(self.order[: len(self)])

    @cached_property
    def front(self) -> pd.DataFrame:
        """The Pareto-optimal layouts over time and memory, fastest first; `rank` is the position in the ranking."""
        return self._frame(self.front_rows)

    @cached_property
    def front_rows(self) -> Indices:
        """Indices of the Pareto-optimal layouts among the kept rows, fastest first."""
        step_time_s = rounded(self.step_time_s)
        front = pareto.front(np.stack([step_time_s, -np.round(self.headroom_bytes)]).T, in_turn=True)
        return front[np.argsort(step_time_s[front], kind="stable")]

    def _frame(self, kept: Indices) -> pd.DataFrame:
        import pandas as pd

        place = np.empty(len(self.order), np.int64)
        place[self.order] = np.arange(1, len(self.order) + 1)
        on_front = set(self.front_rows.tolist())
        rows = [
            {**plan._asdict(), "on_front": at in on_front, **_columns(plan.layout)}
            for at in kept.tolist()
            for plan in [self.row(at, rank=int(place[at]))]
        ]
        return pd.DataFrame(rows, columns=_COLUMNS).drop(columns="layout").set_index("rank")

    def by(self, objective: Objective) -> Plans:
        """Return the same layouts, ranked by a different objective; see `Plans` for emulated clusters."""
        return replace(self, objective=objective)

    def explain(self, first: int = 1, second: int = 2) -> explaining.PlanComparison:
        """Explain part by part why plan `first` is faster or slower than plan `second`.

        Args:
            first: Position of the first plan in the ranking, from 1.
            second: Position of the plan to compare it with.

        Raises:
            SpecError: The ranking has no such position.
        """
        one, other = self.ranked(first, name="first"), self.ranked(second, name="second")
        return self._explained(one, other, (f"plan {first}", f"plan {second}"))

    def ranked(self, rank: int = 1, *, name: str = "rank") -> Layout:
        """Return the layout of a plan.

        Args:
            rank: Position in the ranking, from 1.
            name: Name of the argument in the error message.

        Raises:
            SpecError: The ranking has no such position.
        """
        if isinstance(rank, Integral) and not isinstance(rank, bool) and 1 <= rank <= len(self.order):
            return self.layout(int(self.order[rank - 1]))
        known = f"use 1 to {len(self.order)}" if len(self.order) else f"it is empty: {self.problem}"
        raise SpecError(f"{name}={quoted(rank)} is not a position in the ranking; {known}")

    def _explained(self, one: Layout, other: Layout, names: tuple[str, str]) -> explaining.PlanComparison:
        settings = self.asked.setting(one), self.asked.setting(other)
        return explaining.explain(settings, one, other, names)

    def stage_layers(self, rank: int = 1) -> tuple[int, ...]:
        """Return the number of layers on each pipeline stage of the plan at position `rank`, counted from 1.

        On a mixed cluster, the split is uneven if an uneven split is faster.
        """
        layout = self.ranked(rank)
        model, cluster = self.asked.model, self.asked.cluster
        if cluster.groups:
            one = self.layouts([int(self.order[rank - 1])])
            found = cut(model, one, cluster, self.asked.setting(layout).calibration)
            if found.stages.any():
                return stage_layers(found, 0, model.layers)
        return even_split(model.layers, layout.pipeline)

    def rehearsal(
        self, rank: int = 1, *, model: str | None = None, step_s: float = 1.0, steps: int = 20,
        world_size: int | None = None,
    ) -> Rehearsal:  # fmt: skip
        """Return the plan at position `rank` as a job and an emulated cluster that this machine can run.

        The job trains a small model in slow motion: computation, updates and messages between nodes keep the plan's
        proportions. Devices of different types keep their relative speeds and the plan's division of the layers. A step
        has at most 16 micro-batches, or two for each stage; with fewer stages than planned, it has fewer, for the same
        bubble. A plan for an emulated cluster is a job already, which is returned with its cluster, whatever `step_s`
        is.

        Args:
            rank: Position in the ranking, from 1.
            model: A transformer that jobs can train, such as ``"gpt-small"``; None for the plan's own model if jobs can
                train it, else ``"gpt-nano"``.
            step_s: Predicted step time of the job, in seconds; long enough that this machine's cores are faster than
                the emulated devices.
            steps: Number of steps of the job.
            world_size: Largest number of ranks, for a plan with more devices than this machine has cores: the job then
                keeps the plan's axes, with smaller degrees. None for the plan's own degrees.

        Context and expert axes are kept where jobs can combine them with the other axes, and experts also need a model
        with experts; otherwise, `Rehearsal.notes` says what is left out and why.

        Raises:
            SpecError: No job corresponds to the layout, which offloads for example; or the cluster cannot be emulated.
                The message names what to `fix` in the search.
                Or the axes need more ranks than `world_size`, the ranking has no such position, or messages and fixed
                costs alone take longer than `step_s`.

        Example:
            >>> rehearsal = plan(model, cluster, fix={"data": 1, "tensor": 1}).rehearsal()  # doctest: +SKIP
            >>> run = ss.launch(rehearsal.job, rehearsal.cluster)  # doctest: +SKIP
            >>> ss.compare(run.wait())  # doctest: +SKIP
        """
        from shardscope.planner.rehearsal import rehearsal_of  # needs psutil, which web pages lack

        layout = self.ranked(rank)
        return rehearsal_of(
            self.asked.setting(layout), layout, model=model, step_s=step_s, steps=steps, world_size=world_size
        )

    def trainer_config(self, rank: int = 1) -> TrainerConfig:
        """Return the settings for the plan's framework: flags of Megatron-LM or torchtitan, or JSON of DeepSpeed.

        Args:
            rank: Position in the ranking, from 1.

        Raises:
            SpecError: The framework cannot run the layout, no settings can be written for it, the plan is a job on an
                emulated cluster, or the ranking has no such position.

        Example:
            >>> print(plan(model, cluster, software="megatron-core").trainer_config())  # doctest: +SKIP
        """
        layout = self.ranked(rank)
        setting = self.asked.setting(layout)
        if isinstance(setting.cluster, EmulatedDevices):
            raise SpecError(
                f"plan {rank} is a job on an emulated cluster, not a plan for another framework; use "
                f"plans.rehearsal({rank}).job"
            )
        sizes = {group.per_node for group in setting.cluster.groups or (setting.cluster,)}
        return trainer_config(
            self.asked.model,
            layout,
            setting.calibration.software,
            per_node=sizes.pop() if len(sizes) == 1 else None,
        )

    def why(self, layout: Layout) -> str:
        """Explain why a layout is not the best: the rule it breaks, the memory it lacks, or the better plan."""
        if layout.global_batch != self.global_batch:
            return (
                f"global_batch={layout.global_batch} differs from the table's {self.global_batch}, and steps with "
                f"different batches cannot be compared; call plan with global_batch={layout.global_batch}"
            )
        setting = self.asked.setting(layout)
        problem = problem_with(setting, layout)
        software = setting.calibration.software
        if not problem and self.limits is not None and self.limits.leave_out(layout, software):
            label, missing = software_of(software).label, lacking(software, layout, self.asked.model)
            problem = f"{label} does not support {missing}; name the axis in fix to search it anyway"
        if problem or not len(self):
            return problem or self.problem
        from shardscope.analytic.layouts import Layouts

        if layout.recompute_layers >= layers_of_stage(
            setting.model.layers, layout.pipeline * layout.virtual_stages
        ):
            layout = layout.replace(recompute_layers=0)  # the table writes all layers as 0
        one = Layouts.of([layout])
        time = float(time_of(setting, one).total[0])
        memory = float(memory_parts(setting, one).total[0])
        better = (self.step_time_s <= time) & (self.memory_bytes <= memory)
        beating = next((rank for rank, kept in enumerate(self.order, 1) if better[kept]), 0)
        rival = beating or 1
        kept = int(self.order[rival - 1])
        if self.layout(kept) == layout:
            return f"it is plan {rival} of the table"
        told = self._explained(self.layout(kept), layout, (f"plan {rival}", "it"))
        how = (
            "beaten in both time and memory"
            if beating
            else "not beaten in both time and memory, but slower than the best"
        )
        return " ".join((f"it is {how}:", *told.sentences[:2]))

    @property
    def caveat(self) -> str:
        """The calibration on which the step times are based, and its limitations."""
        known = self.setting.calibration
        if isinstance(self.setting.cluster, EmulatedDevices):
            timed = f"{len(self.order):,} of {self.valid:,} layouts"
            return f"{known.name}; {timed} were timed and fit, in the order of the planner's formula"
        others = [name for name in self.software if name != known.software]
        told = [known.note] * bool(known.note) + [f"other layouts are for {', '.join(others)}"] * bool(others)
        told += self._unshipped()
        return f"software {known.software or 'unknown'}, calibration {known.name}" + (
            f": {'; '.join(told)}" if told else ""
        )

    @cached_property
    def beyond(self) -> Beyond | None:
        """The fastest layout of the unlimited search; None if the software ships it, or if nothing was left out."""
        if self.limits is None or not len(self):
            return None
        recipes = dict.fromkeys(pool.found.recipe for pool in self.pools)
        return fastest_beyond(
            self.asked, self.global_batch, self.limits, list(recipes), float(self.step_time_s.min())
        )

    def _unshipped(self) -> list[str]:
        """Return sentences on features that the best plan's software does not ship, in the plan or in excluded
        layouts.
        """
        best = self[0] if len(self) else None
        if best is None or not best.software:
            return []
        missing = lacking(best.software, best.layout, self.asked.model)
        if self.limits is None or missing:
            return unshipped_texts(best.software, missing, is_named=self.asked.software is not None)
        return limited_texts([*self.limits.spaces], self.beyond, float(self.step_time_s.min()))

    @property
    def _work(self) -> str:
        return work_text(self.global_batch, self.setting.model.seq)

    def __repr__(self) -> str:
        return f"<{'; '.join(self._headline())}>"

    def _headline(self) -> list[str]:
        if not len(self):
            return [f"Plans for {self._work}: {self.problem}"]
        best, devices = self[0], self.asked.cluster.num_devices
        room = gib_text(best.memory_bytes)
        return [
            f"Plans for {self._work}: {self.valid:,} layouts on {devices:,} devices",
            *filter(None, [offload_text(self)]),
            f"best {explaining.seconds(best.step_time_s)} a step, {room}: {short(best.layout)}",
            self.caveat,
        ]

    def _repr_html_(self) -> str:
        return show.html([Sentences(self._headline()), table_of(self)])

    def to_dict(self) -> dict[str, Any]:
        """Return the table, best first, and the number of rejected layouts by reason, as JSON-compatible values."""
        rows = [{**plan._asdict(), "layout": plan.layout.model_dump(mode="json")} for plan in self]
        known, beyond = self.setting.calibration, self.beyond
        return {
            "model": self.asked.model.name, "cluster": self.asked.cluster.name, "needs_offload": self.needs_offload,
            "software": known.software, "calibration": known.name, "note": known.note,
            "global_batch": self.global_batch, "seq": self.setting.model.seq,
            "considered": self.considered, "valid": self.valid, "kept": len(self.order),
            "rejected": dict(self.rejected),
            "problem": self.problem, "plans": rows,
            "beyond": beyond and {**beyond._asdict(), "layout": beyond.layout.model_dump(mode="json")},
        }  # fmt: skip


_AXES = (
    "data", "tensor", "pipeline", "context", "expert", "zero", "shard", "micro_batch", "schedule",
    "virtual_stages", "recompute", "recompute_layers", "sequence_parallel", "offload", "compression",
    "precision", "optimizer",
)  # fmt: skip
_COLUMNS = [*PlanRow._fields, "on_front", *_AXES]


def _columns(layout: Layout) -> dict[str, Any]:
    return {name: layout.axis(name) for name in _AXES}
