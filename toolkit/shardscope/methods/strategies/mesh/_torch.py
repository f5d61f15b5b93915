"""The object that trains on one rank of a mesh: the data axis's strategy, over this rank's part of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.methods.strategies.mesh import expert_axis
from shardscope.methods.strategies.pipeline._torch import PipelineRank
from shardscope.runlog.axes import EXPERT_DATA
from shardscope.training.context import RankContext
from shardscope.training.expert_axis import ExpertAxis
from shardscope.training.expert_split import ExpertSplit, ExpertTensorSplit
from shardscope.training.mesh import RankMesh
from shardscope.training.sequence import SequenceAxis, SequenceSplit
from shardscope.training.strategies import build_strategy
from shardscope.training.strategies.base import RankStrategy
from shardscope.training.tensor import TensorAxis, TensorSplit

if TYPE_CHECKING:
    from shardscope.methods.strategies.mesh import Mesh
    from shardscope.spec.job import Job


def built(settings: Mesh, job: Job, context: RankContext) -> RankStrategy:
    """Return the data axis's strategy for this rank, with the division of the model over the tensor axis."""
    mesh = RankMesh.open(settings.shape(job.world_size), context, timeout_s=job.timeout_s)
    strategy = build_strategy(settings.data_job(job), mesh.context(context, "data"))
    if settings.pipeline > 1:
        stages = mesh.context(context, "pipeline")
        strategy = PipelineRank(job, stages, along=settings.pipeline_job(job), data=strategy)
    if settings.tensor > 1:
        ranks = mesh.context(context, "tensor")
        axis = TensorAxis(ranks.world_size, ranks.rank, ranks.group)
        kind = TensorSplit if settings.expert == 1 else ExpertTensorSplit
        strategy.tensor_split = kind(axis, settings.tensor_plan, cuts_sequences=settings.sequence_parallel)
    if settings.expert > 1:
        share_experts(strategy, settings, job, context)
    if settings.context > 1:
        ranks = mesh.context(context, "context")
        strategy.sequence_split = SequenceSplit(
            SequenceAxis(ranks.world_size, ranks.rank, ranks.group), settings.context_comm
        )
    return strategy


def share_experts(strategy: RankStrategy, settings: Mesh, job: Job, context: RankContext) -> None:
    """Distribute the experts of the model over data ranks: neighbours hold different ones.

    Another object of the data axis's strategy averages an expert's gradients over the ranks that hold it. It belongs to
    that strategy also if a pipeline runs the passes.
    """
    shape = expert_axis.shape(settings, job.world_size)
    mesh = RankMesh.open(shape, context, timeout_s=job.timeout_s, axes=("expert", EXPERT_DATA))
    ranks, holders = mesh.context(context, "expert"), mesh.context(context, EXPERT_DATA)
    strategy.expert_split = ExpertSplit(ExpertAxis(ranks.world_size, ranks.rank, ranks.group))
    strategy.of_experts = build_strategy(expert_axis.holders_job(settings, job), holders)
    strategy.of_data.of_experts = strategy.of_experts
