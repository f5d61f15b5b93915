"""Predictions of a mesh with a pipeline axis: each stage is a mesh of the other axes, with the stage's own layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, cast

import numpy as np

from shardscope.runlog.axes import axis_of, collective_of, on_axis
from shardscope.spec.strategy import Strategy

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import Exchange, StepPlan
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.analytic.schedules.stage_passes import StagePass
    from shardscope.analytic.sharding import Ints
    from shardscope.methods.strategies.mesh import Mesh
    from shardscope.methods.strategies.pipeline import Pipeline
    from shardscope.spec.job import Job

_AFTER_PASSES = ("agreement", "all_reduce")
"""Collectives of a data axis that exchanges in passes, which follow the last pass: checks of layers, and norms."""


def pipeline_of(mesh: Mesh) -> Pipeline:
    """Return the settings of the pipeline axis."""
    return cast("Pipeline", mesh.stages)


def pipeline_step(mesh: Mesh, step: JobStep) -> JobStep:
    """Return the step along the pipeline axis: the ranks of a stage count as one, the slowest with the least memory and
    the fullest experts.
    """
    from shardscope.methods.strategies.mesh.expert_axis import extra_flops

    along = step.in_blocks(mesh.pipeline_job(step.job), step.world_size // mesh.pipeline)
    return replace(along, extra_flops=extra_flops(mesh, step)) if step.expert_loads else along


def _by_data_rank(mesh: Mesh, step: JobStep) -> list[JobStep]:
    """Return the step along the pipeline axis for each data rank, if each has its own shards of gradients; otherwise
    one for all. Gradients of tied parameters are then sums of shards.
    """
    from shardscope.analytic.sharding import row_shard_shapes
    from shardscope.analytic.stage_trace import with_repeated

    along, ranks = pipeline_step(mesh, step), mesh.num_state_ranks(step.world_size)
    if not mesh.data.exchanges_in_passes or ranks == 1:
        return [along]
    stages = pipeline_of(mesh)
    if not stages.is_measured:  # stages are cut by the memory of whole parameters
        cut = stages.replace(split=stages.split_of(along))
        along = replace(along, job=along.job.replace(strategy=cut))
    rows = with_repeated(along.trace, stages.stages(along)).parameters
    shapes = [[row.shape] * ranks if row.is_whole else row_shard_shapes(row.shape, ranks) for row in rows]
    return [
        replace(
            along,
            trace=along.trace.replace(
                parameters=tuple(
                    row.replace(shape=each[rank]) for row, each in zip(rows, shapes, strict=True)
                )
            ),
        )
        for rank in range(ranks)
    ]


def _of_data_ranks(groups: Ints, count: int) -> Ints:
    """Return the groups along the pipeline axis, concatenated into one row of ranks for each place on the tensor axis.

    Args:
        groups: One group in each row, in the order of data ranks.
        count: Number of data ranks whose traffic differs.
    """
    pipeline = groups.shape[1]
    return groups.reshape(count, -1, pipeline).swapaxes(0, 1).reshape(-1, count * pipeline)


def traffic(mesh: Mesh, step: JobStep) -> Traffic | None:
    """Return the pipeline's own traffic, and that of the other axes on each stage.

    The latter is an estimate if layers are split by measured time.
    """
    from shardscope.analytic.communication.axes import axis_traffic, groups_along, side_by_side

    along = [pipeline_of(mesh).traffic(each) for each in _by_data_rank(mesh, step)]
    sent = [each for each in along if each is not None]
    found = [each.job.strategy.traffic(each) for each in blocks(mesh, step)]
    if len(sent) < len(along) or None in found:
        return None
    inside = side_by_side(found)
    if pipeline_of(mesh).is_measured:
        whole = side_by_side([each.job.strategy.traffic(each) for each in _wholes(mesh, step)])
        inside = {
            name: each._replace(bounds=(0 * each.bytes, whole[name].bytes)) for name, each in inside.items()
        }
    groups = groups_along(mesh.shape(step.world_size), "pipeline")
    others = mesh.pipeline - 1
    shared = {
        name: each._replace(assumed_messages=np.full_like(each.bytes, others))
        for name, each in side_by_side(sent).items()
    }
    return {**axis_traffic(shared, "pipeline", _of_data_ranks(groups, len(sent))), **inside}


def plan(mesh: Mesh, step: JobStep) -> StepPlan | None:
    """Return the schedule with the messages between stages; collectives of each pass; and, after the passes, sums of
    tied gradients, exchanges of gradients, and norms.
    """
    from shardscope.analytic.communication.axes import axis_exchanges, groups_along
    from shardscope.analytic.communication.plan import in_groups

    every = [pipeline_of(mesh).plan(each) for each in _by_data_rank(mesh, step)]
    plans = [each for each in every if each is not None]
    found = next(iter(plans), None)
    inside, after = [*_in_passes(mesh, step)], [*_after_passes(mesh, step)]
    if found is None or found.flow is None or len(plans) < len(every) or None in inside or None in after:
        return None
    groups = groups_along(mesh.shape(step.world_size), "pipeline")
    norms = axis_exchanges([each for each in found.exchanges if each.whole is not None], "pipeline", groups)
    parts = groups.reshape(len(plans), -1, mesh.pipeline)
    tied = [
        replace(
            each, collective=on_axis("pipeline", each.collective),
            rounds=in_groups(each.rounds, [tuple(group) for group in part.tolist()]),
        )
        for one, part in zip(plans, parts, strict=True)
        for each in one.exchanges
        if each.whole is None
    ]  # fmt: skip
    # Means of compressed gradients may differ by stage, so they are taken before the sums of tied gradients.
    exchanged = (*after, *tied) if step.job.compression.is_on else (*tied, *after)
    return found._replace(
        exchanges=tuple(filter(None, (*inside, *exchanged, *norms))),
        flow=found.flow._replace(
            copies=step.world_size // mesh.pipeline, sends=on_axis("pipeline", found.flow.sends)
        ),
    )


def states(mesh: Mesh, step: JobStep) -> RankStates | None:
    """Return the other axes' states of the layers that each rank holds.

    They are estimates if layers are split by measured time.
    """
    from shardscope.analytic.memory.held import states_side_by_side

    if not step.trace.pieces:
        return None
    found = [each.job.strategy.states(each) for each in blocks(mesh, step)]
    if None in found:
        return None
    combined = states_side_by_side(found)
    return combined._replace(is_exact=combined.is_exact and not pipeline_of(mesh).is_measured)


def _inner_job(mesh: Mesh, step: JobStep) -> Job:
    """Return the job of the ranks of one stage."""
    ranks = step.world_size // mesh.pipeline
    strategy = mesh.replace(pipeline=1) if ranks > 1 else Strategy("single")
    return step.job.replace(strategy=strategy, world_size=ranks, elastic=None)


def _wholes(mesh: Mesh, step: JobStep) -> Iterator[JobStep]:
    """Yield the step of each pipeline rank if one of its stages, the one with most passes, had all layers."""
    from shardscope.analytic.stage_trace import stage_messages

    passes, ranks = _passes(mesh, step), pipeline_of(mesh).stage_ranks(mesh.pipeline)
    whole = replace(step, slowness=(), update_slowness=(), memory=())
    for rank in range(mesh.pipeline):
        own = [each for each, at in zip(passes, ranks, strict=True) if at == rank]
        most = max(own, key=lambda each: sum(one.gathers + one.is_split for one in each))
        messages = stage_messages(step.trace, [step.trace.pieces], [most], has_loss=True)
        by_unit = [most] * len(step.trace.units) if _exchanges_in_split(mesh) else ()
        yield whole.of_ranks(range(0), _inner_job(mesh, step), step.trace.replace(messages=messages), by_unit)


def _passes(mesh: Mesh, step: JobStep) -> list[tuple[StagePass, ...]]:
    """Return the passes of each stage; all are empty unless the schedule splits backward passes."""
    stages = pipeline_of(mesh)
    if stages.schedule.splits_backward:
        return stages.passes_of_stages(step.micro_batches, mesh.pipeline)
    return [()] * len(stages.stage_ranks(mesh.pipeline))


def _exchanges_in_split(mesh: Mesh) -> bool:
    """Return whether data ranks exchange in passes that may be split."""
    return mesh.data.exchanges_in_passes and pipeline_of(mesh).schedule.splits_backward


def blocks(mesh: Mesh, step: JobStep, *, by_stage: bool = False) -> Iterator[JobStep]:
    """Yield the step of the ranks that hold the same layers, for each pipeline rank or, with `by_stage`, each stage."""
    from shardscope.analytic.stage_trace import rank_traces, stages_of_units, with_repeated
    from shardscope.methods.strategies.mesh.expert_axis import num_layers

    held = pipeline_of(mesh).stages(pipeline_step(mesh, step))
    whole, rows = with_repeated(step.trace, held), iter(step.expert_loads)
    ranks = [rank for rank, _ in held] if by_stage else [*range(mesh.pipeline)]
    if by_stage:
        held = [(stage, pieces) for stage, (_, pieces) in enumerate(held)]
    job, size, passes = _inner_job(mesh, step), step.world_size // mesh.pipeline, _passes(mesh, step)
    traces, stages = rank_traces(whole, held, passes), stages_of_units(whole, held)
    loads: dict[int, tuple[tuple[float, ...], ...]] = {}
    for at, pieces in held:
        layers = sum(num_layers(piece, step.job.recompute) for piece in pieces)
        loads[at] = (*loads.get(at, ()), *islice(rows, layers))
    for rank, trace, own, (_, uneven) in zip(ranks, traces, stages, sorted(loads.items()), strict=True):
        by_unit = [passes[stage] for stage in own] if _exchanges_in_split(mesh) else ()
        block = step.of_ranks(range(rank * size, (rank + 1) * size), job, trace, by_unit)
        yield replace(block, expert_loads=uneven)


def _in_passes(mesh: Mesh, step: JobStep) -> Iterator[Exchange | None]:
    """Yield the collectives of each stage's passes; None if they are unknown."""
    from shardscope.analytic.communication.plan import shifted

    ranks = pipeline_of(mesh).stage_ranks(mesh.pipeline)
    size = step.world_size // mesh.pipeline
    for stage, each in enumerate(blocks(mesh, step, by_stage=True)):
        found = each.job.strategy.plan(each)
        if found is None:
            yield None
            continue
        for exchange in found.exchanges:
            if _is_in_pass(mesh, exchange):
                when = exchange.when._replace(stage=stage)
                yield replace(shifted(exchange, ranks[stage] * size, step.world_size), when=when)


def _after_passes(mesh: Mesh, step: JobStep) -> Iterator[Exchange | None]:
    """Yield the collectives of each pipeline rank's block after its last pass; None if they are unknown."""
    from shardscope.analytic.communication.plan import When, shifted

    for rank, each in enumerate(blocks(mesh, step)):
        found = each.job.strategy.plan(each)
        if found is None:
            yield None
            continue
        for exchange in found.exchanges:
            if not _is_in_pass(mesh, exchange):
                is_late = exchange.when.phase == "optimizer" and exchange.when.part == 1
                when = exchange.when if is_late else When("optimizer", 0.0)
                yield replace(shifted(exchange, rank * each.world_size, step.world_size), when=when)


def _is_in_pass(mesh: Mesh, exchange: Exchange) -> bool:
    """Return whether an exchange of a stage's ranks is part of a pass."""
    if exchange.when.phase == "optimizer":
        return False
    if axis_of(exchange.collective) in {"tensor", "context", "expert"}:
        return exchange.when.part < 1
    return mesh.data.exchanges_in_passes and collective_of(exchange.collective) not in _AFTER_PASSES


def is_predictable(mesh: Mesh, step: JobStep) -> bool:
    """Return whether the trace has what predictions need: layers, of the part of the model that a rank holds."""
    return bool(step.trace.pieces) and mesh.is_divided(step)
