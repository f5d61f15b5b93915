"""All layouts of a search space as arrays of indices; invalid combinations are counted by reason.

The settings of a layout are divided among four tables:

- `Grid`: degrees of parallelism;
- `Bodies`: all settings that determine the work of a rank: the index of a `Grid` row, the micro-batch size, the
  schedule, sequence parallelism and recomputation;
- ways to store model states: a sharding, which is a ZeRO stage with a shard size, and an offload setting;
- compression methods.

Only valid rows of the first two tables are stored; their combinations with the other two are formed chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardscope.analytic.layouts import Layouts, distinct
from shardscope.analytic.recomputation import layers_of_stage
from shardscope.planner.rules import (
    REASONS,
    Grid,
    Ints,
    Mask,
    first_fault,
    grid_faults,
    schedule_faults,
    shard_size,
)
from shardscope.planner.space import LARGEST_MICRO_BATCH, SearchAxes
from shardscope.spec import layout_rules
from shardscope.spec.cluster import Cluster
from shardscope.spec.compression import Compression
from shardscope.spec.divisors import divisors
from shardscope.spec.layout import OFFLOAD_NAMES, RECOMPUTE_NAMES, schedule_names
from shardscope.spec.layout_optimizer import LayoutOptimizer
from shardscope.spec.model import Transformer
from shardscope.spec.optimizer import Optimizer

FULL = RECOMPUTE_NAMES.index("full")
IN_PIPELINE, WITH_OFFLOAD = -1, -2
LEFT_OUT = {IN_PIPELINE: "ZeRO in a pipeline", WITH_OFFLOAD: "ZeRO with offload"}
"""Reasons for leaving out a way to store model states, by the code that replaces its shard size."""


class SharedSettings(NamedTuple):
    """Settings shared by all layouts of a table."""

    precision: str
    optimizer: LayoutOptimizer
    flash_attention: bool


class Bodies(NamedTuple):
    """Combinations of the settings that determine the work of a rank; `grid` is the index of a `Grid` row."""

    grid: Ints
    micro_batch: Ints
    num_micro_batches: Ints
    schedule: Ints
    virtual_stages: Ints
    sequence_parallel: Ints
    recompute: Ints
    recompute_layers: Ints

    @property
    def recomputes_all(self) -> Mask:
        """Mask of the bodies that recompute all layers."""
        return np.asarray((self.recompute == FULL) & (self.recompute_layers == 0))


class Candidates(NamedTuple):
    """All valid layouts of a search space, as nested tables; a "way" is a sharding with an offload setting."""

    grid: Grid
    bodies: Bodies
    zero: Ints
    """ZeRO stage of each way."""
    shard: Ints
    """Number of ranks in a shard group, by grid and way; 0 if the way duplicates another one on this grid, or a code of
    `LEFT_OUT`."""
    offload: Ints
    """Index into `OFFLOAD_NAMES` of each way."""
    needs_full: Mask
    """Mask by way: True if the way is tried only where all layers are recomputed."""
    compression: Ints
    methods: tuple[Compression, ...]
    """Compression methods that the indices in `compression` refer to; the first is ``none``."""
    recipe: SharedSettings
    total: int
    """Number of combinations of all axes, including invalid ones."""
    rejected: dict[str, int]
    """Number of invalid combinations, by reason."""
    chosen: Mask
    """Mask by way to store model states: False if the way belongs to another part of the search; see `only`."""
    num_layers: int
    """Number of layers in the model."""
    recomputes_in_part: bool
    """Whether a layout that does not fit without recomputation is tried with the fewest recomputed layers that fit."""

    @property
    def ways(self) -> Mask:
        """Mask by grid and way to store model states: False if the way duplicates another one on this grid."""
        return (self.shard > 0) & self.chosen

    def ways_of(self, body: Ints) -> Mask:
        """Return a mask by body and way: False for duplicates, and for ways that need more than the body recomputes."""
        return self.ways[self.bodies.grid[body]] & (self.bodies.recomputes_all[body, None] | ~self.needs_full)

    @property
    def compressions(self) -> Ints:
        """Number of compression methods to try on each grid; 1 on a grid without replicas."""
        alone = self.grid.data * self.grid.context == 1
        return np.where(alone, 1, len(self.compression))

    @property
    def num_valid(self) -> int:
        """Number of valid layouts."""
        return self.total - sum(self.rejected.values())

    def only(self, chosen: Mask) -> Candidates:
        """Return the candidates with only the `chosen` ways to store model states; the counts cover only these ways."""
        count, before = int(chosen.sum()), int(self.chosen.sum())
        part = self._replace(chosen=chosen, total=self.total // before * count)
        rejected = {name: lost // before * count for name, lost in self.rejected.items()}
        return part._replace(rejected=rejected | _lost_ways(part))

    def layouts(
        self, body: Ints, way: Ints, compression: Ints, recompute_layers: Ints | None = None
    ) -> Layouts:
        """Return the layouts with these indices into `bodies`, `ways` and `compression`.

        Args:
            body: Indices into `bodies`.
            way: Indices into `ways`.
            compression: Indices into `compression`.
            recompute_layers: Number of layers per stage to recompute, which replaces the body's setting; None, or 0 in
                a row, keeps the body's setting.
        """
        bodies, grids = self.bodies, self.grid
        recompute, layers = bodies.recompute.take(body), bodies.recompute_layers.take(body)
        if recompute_layers is not None:
            recompute = np.where(recompute_layers > 0, FULL, recompute)
            layers = np.where(recompute_layers > 0, recompute_layers, layers)
        grid = bodies.grid.take(body)
        return Layouts(
            data=grids.data.take(grid),
            tensor=grids.tensor.take(grid),
            pipeline=grids.pipeline.take(grid),
            context=grids.context.take(grid),
            expert=grids.expert.take(grid),
            zero=self.zero.take(way),
            shard=self.shard.take(grid * len(self.zero) + way),
            micro_batch=bodies.micro_batch.take(body),
            num_micro_batches=bodies.num_micro_batches.take(body),
            virtual_stages=bodies.virtual_stages.take(body),
            schedule=bodies.schedule.take(body),
            recompute=recompute,
            recompute_layers=layers,
            offload=self.offload.take(way),
            compression=self.compression.take(compression),
            sequence_parallel=bodies.sequence_parallel.take(body),
            compressions=self.methods,
            **self.recipe._asdict(),
        )


def candidates(
    model: Transformer,
    cluster: Cluster,
    *,
    global_batch: int,
    space: SearchAxes,
    recipe: SharedSettings | None = None,
    stages: Sequence[int] = (),
) -> Candidates:
    """Enumerate the valid rows of `Grid` and `Bodies`, and count the invalid combinations by reason.

    Args:
        model: The model.
        cluster: The cluster, all of whose devices are used.
        global_batch: Sequences in one optimizer step.
        space: Values to try on each axis.
        recipe: Settings shared by all layouts; None for ``bf16-mixed``, ``adamw`` and flash attention.
        stages: ZeRO stages of the whole search, if `space` is a part of it. On one replica, all stages are
            the same, so only the lowest is tried.
    """
    recipe = recipe or SharedSettings("bf16-mixed", Optimizer("adamw"), flash_attention=True)
    grid, lost_grids = _grids(model, cluster.num_devices, global_batch, space)
    bodies, lost_bodies, choices = _bodies(model, grid, global_batch, space, recipe)
    zero, offload, shard = _states(cluster, grid, space, stages or space.zero)
    needs_full = np.isin(offload, [OFFLOAD_NAMES.index(name) for name in space.full_for_offload])
    methods = distinct(space.compression)
    compression = np.array([methods.index(method) for method in dict.fromkeys(space.compression)], np.int64)
    ways, packed = len(zero), len(compression)
    rejected = {name: count * choices * ways * packed for name, count in lost_grids.items()}
    for name, count in lost_bodies.items():
        rejected[name] = rejected.get(name, 0) + count * ways * packed
    in_part = space.recompute_layers is None and {"none", "full"} <= {*space.recompute} and not cluster.groups
    found = Candidates(
        grid, bodies, zero, shard, offload, needs_full, compression, methods, recipe, 0, {}, np.ones(ways, bool),
        num_layers=model.layers, recomputes_in_part=in_part,
    )  # fmt: skip
    rejected |= _lost_ways(found)
    total = (sum(lost_grids.values()) + len(grid.data)) * choices * ways * packed
    return found._replace(
        total=total, rejected={name: rejected[name] for name in REASONS if rejected.get(name)}
    )


def _lost_ways(found: Candidates) -> dict[str, int]:
    """Return the numbers of combinations that are left out, by reason, including duplicates of other combinations."""
    at, packed = found.bodies.grid, len(found.compression)
    left_out = {
        reason: int(((found.shard == code) & found.chosen).sum(1)[at].sum()) * packed
        for code, reason in LEFT_OUT.items()
    }
    every = len(at) * int(found.chosen.sum()) * packed
    kept = int((found.ways.sum(1) * found.compressions)[at].sum())
    too_little = ((found.ways & found.needs_full).sum(1) * found.compressions)[at]
    twins = every - sum(left_out.values()) - kept
    unmoved = int(too_little[~found.bodies.recomputes_all].sum())
    return left_out | {"recomputation with offload": unmoved, "no replicas": twins}


def _grids(model: Transformer, devices: int, batch: int, space: SearchAxes) -> tuple[Grid, dict[str, int]]:
    every = divisors(devices)
    experts = divisors(model.mixture.experts) if model.mixture else (1,)
    tensor, pipeline, context, expert = _product(
        space.tensor or every, space.pipeline or every, space.context or every, space.expert or experts
    )
    data = np.maximum(1, devices // (tensor * pipeline * context))
    grid = Grid(tensor, pipeline, context, expert, data)
    faults = grid_faults(model, grid, devices=devices, batch=batch, data=space.data)
    return Grid(*(column[faults < 0] for column in grid)), _counts(faults)


def _bodies(
    model: Transformer, grid: Grid, batch: int, space: SearchAxes, recipe: SharedSettings
) -> tuple[Bodies, dict[str, int], int]:
    """Return the valid rows of `Bodies`, the number of invalid rows by reason, and the number of all rows per grid."""
    sizes = np.array(space.micro_batch or divisors(batch, largest=LARGEST_MICRO_BATCH), np.int64)
    options = space.schedule_options
    recompute = [RECOMPUTE_NAMES.index(name) for name in space.recompute]
    counts = space.recompute_layers or (0,)
    place, size, option, sequence, again, layers = _product(
        range(len(grid.data)),
        range(len(sizes)),
        range(len(options)),
        space.sequence_parallel,
        recompute,
        counts,
    )
    micro_batch, share = sizes.take(size), batch // grid.data.take(place)
    stages, tensor = grid.pipeline.take(place), grid.tensor.take(place)
    count = np.maximum(1, share // micro_batch)
    known = schedule_names()
    names = np.array([known.index(name) for name, _ in options], np.int64)
    virtual = np.array([held for _, held in options], np.int64)
    held = np.where(stages > 1, virtual.take(option), 1)
    of_stage = layers_of_stage(model.layers, stages * held)
    uneven_part = layout_rules.uneven_part(model, grid.context.take(place), tensor)
    rules = {
        "micro-batch": layout_rules.indivisible(share, micro_batch),
        **_schedule_rules(model, options, option, stages, count),
        "sequence-parallel": (sequence == 1) & ((tensor == 1) | uneven_part),
        "no recomputation": (again == 1) & (recipe.flash_attention and "none" in space.recompute),
        "recompute-layers": _twin_counts(counts, layers, again, of_stage),
    }
    faults = first_fault(rules, len(place))
    layers = np.where((again == FULL) & (layers < of_stage), layers, 0)
    bodies = Bodies(place, micro_batch, count, names.take(option), held, sequence, again, layers)
    choices = len(sizes) * len(options) * len(space.sequence_parallel) * len(recompute) * len(counts)
    return Bodies(*(column[faults < 0] for column in bodies)), _counts(faults), choices


def _twin_counts(counts: tuple[int, ...], layers: Ints, again: Ints, of_stage: Ints) -> Mask:
    """Return a mask of the rows that duplicate a row with an earlier number of layers to recompute.

    Args:
        counts: Numbers of layers to try; 0 for all.
        layers: Number of layers to recompute, by row.
        again: Index into `RECOMPUTE_NAMES`; the number matters only with full recomputation.
        of_stage: Number of layers on a stage; recomputing this many or more means all of them.
    """
    twins = np.zeros(len(layers), bool)
    for place, count in enumerate(counts):
        for earlier in counts[:place]:
            all_too = ((count == 0) | (count >= of_stage)) & ((earlier == 0) | (earlier >= of_stage))
            twins |= (layers == count) & ((again != FULL) | all_too)
    return twins


def _schedule_rules(
    model: Transformer, options: tuple[tuple[str, int], ...], option: Ints, stages: Ints, count: Ints
) -> dict[str, Mask]:
    broken = {"schedule": np.zeros(len(option), bool), "no pipeline": np.zeros(len(option), bool)}
    for place, (name, virtual) in enumerate(options):
        rows = option == place
        found = schedule_faults(
            name, virtual, layers=model.layers, stages=stages[rows], microbatches=count[rows],
            is_first=place == 0,
        )  # fmt: skip
        for reason, mask in found.items():
            broken[reason][rows] = mask
    return broken


def _states(
    cluster: Cluster, grid: Grid, space: SearchAxes, stages: Sequence[int]
) -> tuple[Ints, Ints, Ints]:
    """Return the ZeRO stage and the offload setting of each way to store model states, and `Candidates.shard`."""
    ways = [
        (zero, kind, offload)
        for zero in space.zero
        for kind in (space.shard if zero else space.shard[:1])
        for offload in space.offload
    ]
    ranks, needed = grid.data * grid.context, dict(space.zero_for_offload)
    columns = []
    for zero, kind, offload in ways:
        least = needed.get(offload, 0)
        lowest = min((each for each in stages if each >= least), default=0)
        shard = shard_size(cluster, kind if zero else "all", grid)
        twin = (ranks == 1) & (zero > lowest) if zero else np.zeros(len(ranks), bool)
        if zero and kind == "node":
            twin |= (shard == 1) | ((shard == ranks) & ("all" in space.shard))
        # Without replicas, the stage has no effect, unless offloading needs it.
        counts = (ranks > 1) | (zero > min(stages))
        is_lost = (grid.pipeline > 1) & counts & (zero not in space.zero_in_pipelines)
        found = np.where(is_lost, IN_PIPELINE, np.where(twin, 0, shard))
        columns.append(found if zero >= least else np.full(len(ranks), WITH_OFFLOAD))
    zeros, _, offloads = zip(*ways, strict=True)
    named = [OFFLOAD_NAMES.index(name) for name in offloads]
    return np.array(zeros, np.int64), np.array(named, np.int64), np.stack(columns, axis=1)


def _product(*axes: object) -> tuple[Ints, ...]:
    """Return all combinations of the axes' values, one column per axis; the last axis varies fastest."""
    values = [np.asarray(list(axis), np.int64) for axis in axes]  # type: ignore[call-overload]
    index = np.indices([len(value) for value in values]).reshape(len(values), -1)
    return tuple(value.take(at) for value, at in zip(values, index, strict=True))


def _counts(faults: Ints) -> dict[str, int]:
    codes = list(REASONS)
    found = np.bincount(faults[faults >= 0], minlength=len(codes))
    return {code: int(count) for code, count in zip(codes, found, strict=True) if count}
