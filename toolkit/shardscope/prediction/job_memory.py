"""Peak memory of each rank of a job, by type of memory.

Terms have the names of `Run.memory` if they are the same quantity, the peak of each memory type on its own. For a
replicated or sharded model, activations, gradients and gathered parameters are instead those at the peak of the rank's
total memory; the names of these terms say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory import RankStates, module_memory, torch_workspace_bytes
from shardscope.analytic.memory.fully_sharded import gathered_in_stages, gathered_peak
from shardscope.analytic.memory.held import Sharding, keeps_gradients
from shardscope.analytic.memory.module import gathered_sizes, saved_and_gathered
from shardscope.analytic.memory.pipelines import pipeline_peaks
from shardscope.analytic.memory.running import RankPeak
from shardscope.analytic.memory.sharded_stages import ShardedStages
from shardscope.analytic.stage_trace import with_repeated
from shardscope.analytic.terms import Term
from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.methods.strategies.mesh import Mesh
from shardscope.methods.strategies.mesh.pipeline_predictions import blocks
from shardscope.methods.strategies.sharded import FullyShardedStrategy
from shardscope.prediction.loads import Samples, samples_by_rank
from shardscope.prediction.traced import Traced
from shardscope.spec import Job
from shardscope.spec.cluster import Device
from shardscope.spec.optimizer import OptimizerStates

if TYPE_CHECKING:
    from shardscope.methods.strategies.pipeline import Pipeline

_STATES = (
    "Rajbhandari et al. 2020, arXiv 1910.02054; sharded as in torch; parameters include the model's buffers"
)
_TRACE = "one step traced on the meta device"
_WORKSPACE = "workspaces of cuBLAS, in torch"
_MESSAGES = "torch.distributed.pipelining: a buffer for each message that a pass receives"
_WORK = "compression state, updates kept until all norms are known, received messages"


def rank_memory(
    step: JobStep, found: Traced, states: RankStates | None, device: Device | None = None
) -> list[Term] | None:
    """Return the peak memory of each rank, in bytes; None if the strategy has no formula, the loss was not traced, or
    no gradient flows through a layer of a pipeline.

    Args:
        step: The training step to predict.
        found: Trace of the job's model.
        states: Bytes of model states on each rank; None if unknown.
        device: Device of the ranks; None if the ranks run on this machine.
    """
    workspace = torch_workspace_bytes(device) if step.is_on_gpus else 0.0
    if not step.trace.saved_bytes:
        return None
    ranks: list[Term] = []
    along = step.job.strategy.pipeline_step(step)
    if step.job.strategy.zero_stage is not None and along is None:
        seen: dict[tuple[float, ...], Term] = {}  # ranks that hold as much are computed only once
        for rank, samples in enumerate(samples_by_rank(step)):
            kind: tuple[float, ...] = (*samples, _shard(step.job, rank))
            if states is not None:
                kind = (*samples, states.optimizer[rank], states.gradients[rank], _work(states, rank, 0.0))
            if kind not in seen:
                seen[kind] = _by_moments(step, found, states, rank, samples, workspace)
            ranks.append(seen[kind])
        return ranks
    saved = _activations(step)
    if states is None or saved is None:
        return None
    if along is not None:
        if (peaks := _in_a_pipeline(step, along)) is None:
            return None
        return [
            _sum(
                ("parameters", float(states.parameters[rank]), _STATES),
                ("optimizer", float(states.optimizer[rank]), _STATES),
                ("activations at the peak", peak.activations, _TRACE),
                ("gradients at the peak", peak.gradients, _STATES),
                ("messages at the peak", peak.messages, _MESSAGES),
                ("buffers", _work(states, rank, 0.0), _WORK),
                ("batch", found.sample_bytes * samples.step, "inputs and targets"),
                ("workspace", workspace, _WORKSPACE),
            )
            for rank, (peak, samples) in enumerate(zip(peaks, samples_by_rank(step), strict=True))
        ]
    return [
        _sum(
            ("parameters", float(states.parameters[rank]), _STATES),
            ("gradients", float(states.gradients[rank]), _STATES),
            ("optimizer", float(states.optimizer[rank]), _STATES),
            ("activations", held, _TRACE),
            ("buffers", _work(states, rank, 0.0), _WORK),
            ("batch", found.sample_bytes * samples.step, "inputs and targets"),
            ("workspace", workspace, _WORKSPACE),
        )
        for rank, (held, samples) in enumerate(zip(saved, samples_by_rank(step), strict=True))
    ]


def kinds_by_rank(step: JobStep, states: RankStates | None) -> dict[str, npt.NDArray[np.float64]]:
    """Return the peak bytes of each type of memory on each rank; unknown types are left out.

    Args:
        step: The training step to predict.
        states: Bytes of model states on each rank; None if unknown.

    Returns:
        Arrays of shape `(world_size,)`, one value per rank, by type: ``parameters``, ``gradients``, ``optimizer``,
        ``activations``, ``gathered``, ``buffers``.
    """
    known = {
        "parameters": None if states is None else states.parameters,
        "gradients": None if states is None else states.gradients,
        "optimizer": None if states is None else states.optimizer,
        "activations": _activations(step),
        "gathered": _gathered(step),
        "buffers": None if states is None else states.buffers,
    }
    return {kind: np.asarray(held, dtype=float) for kind, held in known.items() if held is not None}


def held_at_once(
    step: JobStep, kinds: Mapping[str, npt.NDArray[np.float64]], by_rank: Sequence[Term]
) -> npt.NDArray[np.float64]:
    """Return the peak memory of all `kinds` together on each rank, in bytes, with shape `(world_size,)`.

    A run records this peak; it excludes intermediate results, gradients of activations, and the batch. A replica or
    shard holds the gradients of a step only once its activations are freed, unless gradients stay in buckets or belong
    to an earlier micro-batch. The ranks of other strategies may hold all types at the same time, but no more than their
    peak with intermediate results.

    Args:
        step: The training step to predict.
        kinds: Peak bytes of each type of memory on each rank, as from `kinds_by_rank`.
        by_rank: Peak memory of each rank, as from `rank_memory`.
    """
    none = np.zeros(step.world_size)
    stage = step.job.strategy.held_stage
    gradients = kinds.get("gradients", none)
    forward = kinds.get("activations", none)
    if (stage or 0) > 1:
        is_spread = step.job.strategy.pipeline_step(step) is not None
        forward = forward + kinds["gathered"] if is_spread else _saved_and_gathered(step, stage or 0)
    both = stage is None or step.micro_batches > 1 or keeps_gradients(stage, step.job.num_state_ranks)
    before = gradients - sum(_late_gradients(step)) if both else none
    moving = np.maximum(forward + before, gradients)
    held = moving + sum((kinds.get(kind, none) for kind in ("parameters", "optimizer", "buffers")), none)
    return np.minimum(held, [term.value for term in by_rank])


def _in_a_pipeline(step: JobStep, along: JobStep) -> list[RankPeak] | None:
    """Return the peaks of the ranks of a pipeline; None if no gradient flows through one of its layers.

    Args:
        step: The training step.
        along: The step of the ranks along the pipeline axis.
    """
    strategy = cast("Pipeline", along.job.strategy)
    copies = step.world_size // along.world_size
    plan = strategy.plan(along)
    assert plan is not None
    assert plan.flow is not None
    split, sharded = strategy.split_of(along), None
    stage = step.job.strategy.held_stage if step.job.num_state_ranks > 1 else None
    if stage is not None and stage > 1:
        along = replace(along, trace=with_repeated(along.trace, strategy.stages(along)))
        shares = _shares_buffers(step)
        sharded = ShardedStages(stage, _shards(step.job), _expert_ranks(step.job), shares_buffers=shares)
    peaks = pipeline_peaks(
        along, plan.flow.table, split, passes=plan.flow.passes, sharded=sharded, keeps_gradients=stage == 1,
        exchanged=_exchanged(step),
    )  # fmt: skip
    return None if peaks is None else [each for each in peaks for _ in range(copies)]


def _exchanged(step: JobStep) -> list[float]:
    """Return the bytes of the largest bucket of gradients on each rank of a pipeline; empty if there are no buckets.

    After the passes, gradients are copied into a bucket, averaged there, and copied back.
    """
    mesh = step.job.strategy
    if (
        not isinstance(mesh, Mesh)
        or not isinstance(mesh.data, BucketedStrategy)
        or step.job.num_state_ranks == 1
    ):
        return []
    found = (block.buckets(mesh.data.bucket_mb) for block in blocks(mesh, step))
    return [
        float(step.element_bytes * max((sum(map(prod, shapes)) for shapes in buckets), default=0))
        for buckets in found
    ]


def _activations(step: JobStep) -> list[float] | None:
    """Return the peak bytes that each rank saves for the backward passes of its samples; None if unknown."""
    saved: list[float] | None = step.job.strategy.activations(step)
    if saved is None:
        return None
    samples = samples_by_rank(step)
    return [held * each.micro_batch / step.samples for held, each in zip(saved, samples, strict=True)]


def _gathered(step: JobStep) -> list[float]:
    """Return the peak size of the gathered parameters on each rank, in bytes."""
    stage = step.job.strategy.held_stage
    if stage is None or stage < 2:
        return [0.0] * step.world_size
    cut = _cut(step, stage)
    along = step.job.strategy.pipeline_step(step)
    if along is None:
        sizes = gathered_sizes(step.trace, recompute=step.job.recompute, sharding=cut)
        found = [gathered_peak(sizes, stage=stage)]
    elif step.trace.pieces:
        stages = cast("Pipeline", along.job.strategy).stages(along)
        found = gathered_in_stages(
            with_repeated(step.trace, stages), stages, stage=stage, ranks=cut.ranks,
            element_bytes=cut.element_bytes, expert_ranks=cut.expert_ranks,
        )  # fmt: skip
    else:
        found = [0.0]
    return [each for each in found for _ in range(step.world_size // len(found))]


def _saved_and_gathered(step: JobStep, stage: int) -> npt.NDArray[np.float64]:
    """Return the maximum sum of bytes of activations and gathered parameters, which peak at different moments."""
    cut = _cut(step, stage)
    sizes = [samples.micro_batch for samples in samples_by_rank(step)]
    found = {
        size: saved_and_gathered(step.trace, batch=size, recompute=step.job.recompute, sharding=cut)
        for size in set(sizes)
    }
    return np.array([found[size] for size in sizes])


def _work_name(states: RankStates | None) -> str:
    """Return the name of the term for work buffers: the name of the memory type if all buffers are known."""
    return "buffers at the peak" if states is None or states.buffers is None else "buffers"


def _work(states: RankStates | None, rank: int, otherwise: float) -> float:
    return otherwise if states is None or states.buffers is None else float(states.buffers[rank])


def _by_moments(  # noqa: PLR0917
    step: JobStep, found: Traced, states: RankStates | None, rank: int, samples: Samples, workspace: float
) -> Term:
    """Return the peak memory of one rank with a replicated or ZeRO-sharded model, from the traced moments of a step."""
    job, sharing = step.job, step.job.strategy.of_data
    stage, experts = job.strategy.held_stage, _expert_ranks(job)
    assert stage is not None
    held = module_memory(
        found.table, batch=samples.micro_batch, data_bytes=found.sample_bytes * samples.step / samples.micro_batch,
        optimizer=_kept(step), recompute=job.recompute,
        zero_stage=stage, data_parallel=_shards(job), rank=_shard(job, rank),
        bucket_mb=getattr(sharing, "bucket_mb", 25.0), accumulates=samples.step > samples.micro_batch,
        element_bytes=step.element_bytes,
        late_gradients=_late_gradients(step),
        shares_buffers=_shares_buffers(step),
        expert_ranks=experts,
    )  # fmt: skip
    moving = held.moving
    if (
        stage == 1 and states is not None
    ):  # its gradients are in buckets, whole, or in shards of the rank's own
        moving += float(states.gradients[rank]) - held.gradients
    parameters = held.parameters + held.buffers
    if experts is not None and states is not None:
        parameters = float(states.parameters[rank])
    return _sum(
        ("parameters", parameters, _STATES),
        ("optimizer", held.optimizer if states is None else float(states.optimizer[rank]), _STATES),
        ("activations at the peak", held.alive, _TRACE),
        ("gradients and gathered parameters at the peak", moving, _STATES),
        (_work_name(states), _work(states, rank, held.work), _WORK),
        ("batch", held.data, "inputs and targets"),
        ("workspace", workspace, _WORKSPACE),
    )


def _late_gradients(step: JobStep) -> list[float]:
    """Return the bytes of each unit's gradients that are in no bucket, unlike others: those of experts on different
    ranks. Empty if there are none, or if an earlier micro-batch has computed them.
    """
    ranks, stage = _expert_ranks(step.job), step.job.strategy.held_stage or 0
    if ranks is None or step.micro_batches > 1 or stage > 1 or (stage == 1 and ranks > 1):
        return []
    found = [0.0] * len(step.trace.units)
    for row in step.trained:
        found[row.unit] += step.element_bytes * row.num_elements * row.is_expert
    return found


def _kept(step: JobStep) -> OptimizerStates:
    """Return the size of the optimizer's state; on GPUs, layer-wise optimizers keep no buffers between steps."""
    return step.kept._replace(buffers_updates=False) if step.is_on_gpus else step.kept


def _expert_ranks(job: Job) -> int | None:
    """Return the number of ranks that hold the same experts; None if all ranks hold all of them."""
    experts = (job.strategy.degrees(job.world_size) or {}).get("expert", 1)
    return None if experts == 1 else job.num_state_ranks // int(experts)


def _shares_buffers(step: JobStep) -> bool:
    """Return whether ranks exchange the units of ZeRO 2 and 3 in buffers that they share."""
    sharing = step.job.strategy.of_data
    if not isinstance(sharing, FullyShardedStrategy) or _expert_ranks(step.job) is not None:
        return False
    return sharing.may_share_buffers(step)


def _cut(step: JobStep, stage: int) -> Sharding:
    """Return how parameters are sharded in ZeRO stages 2 and 3."""
    return Sharding(
        stage, _shards(step.job), 0, 0.0, step.element_bytes, expert_ranks=_expert_ranks(step.job)
    )


def _shards(job: Job) -> int:
    """Return the number of ranks over which a model, or a tensor rank's part of it, is sharded."""
    degrees = job.strategy.degrees(job.world_size) or {}
    return int(degrees.get("shard", job.num_state_ranks))


def _shard(job: Job, rank: int) -> int:
    """Return which of the shards a rank holds."""
    return job.strategy.data_index(rank, job.world_size) % _shards(job)


def _sum(*parts: tuple[str, float, str]) -> Term:
    terms = tuple(Term(name, value, "bytes", "", {}, source) for name, value, source in parts if value > 0)
    return Term.total("memory", terms)
