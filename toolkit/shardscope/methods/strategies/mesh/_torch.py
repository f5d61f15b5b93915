"""The object that trains on one rank of a mesh: that of the data axis, over the part of the model that a rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.training.context import RankContext

if TYPE_CHECKING:
    from shardscope.methods.strategies.mesh import Mesh
    from shardscope.spec.job import Job


def built(settings: Mesh, job: Job, context: RankContext) -> Any:
    """Return the data axis's strategy for this rank."""
    raise NotImplementedError
