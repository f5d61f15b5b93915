"""The pipeline axis of a mesh: what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.errors import SpecError, quoted

if TYPE_CHECKING:
    from shardscope.methods.strategies.mesh import Mesh
    from shardscope.spec.job import Job


def check(mesh: Mesh, job: Job) -> None:
    """Reject what the pipeline itself cannot run, and what is not available yet with layers on several ranks."""
    mesh.pipeline_job(job)
    if job.compression.is_on:
        _check_compression(mesh, job)
    for name in ("replicas", "shards"):
        if getattr(mesh.data, name, None) not in (None, 1):
            raise SpecError(
                f"strategy.data.{name}={getattr(mesh.data, name)} is not available with "
                f"strategy.pipeline={mesh.pipeline} yet; leave {name} out"
            )
    if mesh.data.zero_stage and getattr(mesh.stages, "memory_bound", None) is not None:
        raise SpecError(
            f"strategy.stages.memory_bound counts whole model states, and strategy.data={quoted(mesh.data.label)} "
            "shares them; leave memory_bound out, or use strategy.data='ring'"
        )


def _check_compression(mesh: Mesh, job: Job) -> None:
    """Reject compression of what is not the whole gradient of a step, or of what depends on other stages."""
    what = f"compression={job.compression.name!r}"
    if mesh.data.zero_stage:
        raise SpecError(
            f"{what} is not available with strategy.data={quoted(mesh.data.label)} and "
            f"strategy.pipeline={mesh.pipeline} yet; use strategy.data='ring', or compression='none'"
        )
    if not job.compression.is_fixed:
        raise SpecError(
            f"{what} is not available with strategy.pipeline={mesh.pipeline} yet, because it depends on the model as a "
            "whole, of which each rank has some layers; use for example compression='int8'"
        )
