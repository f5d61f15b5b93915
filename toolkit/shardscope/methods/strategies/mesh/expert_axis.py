"""The expert axis of a mesh: what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.errors import SpecError, quoted
from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.spec.divisors import divisors_text
from shardscope.spec.models import MODELS, GPTConfig, transformer_of

if TYPE_CHECKING:
    from shardscope.methods.strategies.mesh import Mesh
    from shardscope.spec.job import Job


def check(mesh: Mesh, job: Job) -> None:
    """Reject a model without experts, and what is not available yet with experts on different ranks."""
    ranks = mesh.num_data_ranks(job.world_size)
    if ranks % mesh.expert:
        raise SpecError(
            f"strategy.expert={mesh.expert} does not divide the {ranks} data ranks, over which it distributes experts; "
            f"use one of {divisors_text(ranks, near=mesh.expert)}"
        )
    for axis in ("tensor", "context", "pipeline"):
        if (size := getattr(mesh, axis)) > 1:
            raise SpecError(
                f"strategy.expert={mesh.expert} is not available with {axis}={size} yet; use {axis}=1 or expert=1"
            )
    if not isinstance(mesh.data, BucketedStrategy):
        raise SpecError(
            f"strategy.data={quoted(mesh.data.label)} is not available with strategy.expert={mesh.expert} yet; use "
            "'ring', 'tree', 'hierarchical' or 'all-reduce'"
        )
    for name, value in (("optimizer", job.optimizer.user_code), ("compression", job.compression.is_on)):
        if value:
            raise SpecError(
                f"{name}={quoted(getattr(job, name).name)} is not available with strategy.expert={mesh.expert} yet; "
                + ("use a built-in one" if name == "optimizer" else "use compression='none'")
            )
    _check_model(mesh, job)


def _check_model(mesh: Mesh, job: Job) -> None:
    if not isinstance(job.model, str):
        return  # ranks check it when they divide the model
    transformer = transformer_of(job.model)
    if transformer is None or transformer.mixture is None:
        able = ", ".join(
            repr(name) for name, each in MODELS.items() if isinstance(each, GPTConfig) and each.mixture
        )
        raise SpecError(
            f"model={job.model!r} has no experts to distribute over strategy.expert={mesh.expert} ranks; use one of "
            f"{able}, or expert=1"
        )
    experts = transformer.mixture.experts
    if experts % mesh.expert:
        raise SpecError(
            f"strategy.expert={mesh.expert} does not divide the {experts} experts of model={job.model!r}; use one of "
            f"{divisors_text(experts, near=mesh.expert)}"
        )
