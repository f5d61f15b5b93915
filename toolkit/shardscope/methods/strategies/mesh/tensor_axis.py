"""The tensor axis of a mesh: what it refuses, and the collectives of divided layers in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.errors import SpecError, quoted
from shardscope.methods.strategies.mesh.messages import collectives_of, norms, traffic_of
from shardscope.spec.layout import Layout
from shardscope.spec.models import transformer_of

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import When
    from shardscope.analytic.job_step import JobStep
    from shardscope.methods.strategies.mesh import Mesh
    from shardscope.spec.job import Job


def check(mesh: Mesh, job: Job) -> None:
    """Reject what is not available yet with divided layers."""
    _check_model(mesh, job)
    if job.compression.is_on:
        _check_compression(mesh, job)
    shards = mesh.data.settings.get("shards")
    if shards is not None:
        raise SpecError(
            f"strategy.data.shards={shards} is not available with strategy.tensor={mesh.tensor} yet; leave "
            "shards out"
        )


def _check_compression(mesh: Mesh, job: Job) -> None:
    """Reject compression that would let the ranks' copies of whole tensors drift apart."""
    if mesh.data.zero_stage:
        raise SpecError(
            f"compression={job.compression.name!r} cannot be combined with strategy.data={quoted(mesh.data.label)} and "
            f"strategy.tensor={mesh.tensor}: shards mix divided and whole tensors, whose copies would drift apart; use "
            "strategy.data='ring', or compression='none'"
        )
    if not job.compression.is_fixed:
        raise SpecError(
            f"compression={job.compression.name!r} cannot be combined with strategy.tensor={mesh.tensor}: it depends "
            "on all tensors together, of which tensor ranks have different parts, so their copies of whole tensors "
            "would drift apart; use for example compression='int8'"
        )


def _check_model(mesh: Mesh, job: Job) -> None:
    """Reject a model of the catalogue that has no plan, or whose layers cannot be divided equally."""
    if mesh.tensor_plan is not None or not isinstance(job.model, str):
        return  # ranks check it when they divide the model
    transformer = transformer_of(job.model)
    if transformer is None:
        raise SpecError(
            f"tensor={mesh.tensor} needs a plan that says which layers are divided, but model={job.model!r} has none; "
            f'use a GPT, or give ss.Strategy("mesh", tensor={mesh.tensor}, tensor_plan={{...}})'
        )
    if mesh.sequence_parallel and transformer.mixture is not None:
        raise SpecError(
            f"strategy.sequence_parallel=True is not available with model={job.model!r}, whose routers choose experts "
            "for whole sequences; use sequence_parallel=False"
        )
    Layout(tensor=mesh.tensor, sequence_parallel=mesh.sequence_parallel).check(transformer)


def calls(mesh: Mesh, step: JobStep) -> list[tuple[When, Traffic]]:
    """Return the traffic of each collective of a tensor group in a step."""
    from shardscope.analytic.communication.plan import When

    if mesh.tensor == 1:
        return []
    found = [
        (when, traffic_of(op, num_bytes, mesh.tensor, step.backend))
        for when, op, num_bytes in collectives_of("tensor", step)
    ]
    end = When("backward", 1.0, step.micro_batches - 1)
    return [*found, *((end, traffic) for traffic in norms(step, mesh.tensor))]
