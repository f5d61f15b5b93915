"""The context axis of a mesh: what it refuses, and the collectives of attention over parts of sequences in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.errors import SpecError
from shardscope.methods.strategies.mesh.messages import messages_of
from shardscope.spec.context_comm import parts_per_rank
from shardscope.spec.divisors import divisors_text
from shardscope.spec.layout import Layout
from shardscope.spec.models import transformer_of

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import When
    from shardscope.analytic.job_step import JobStep
    from shardscope.methods.strategies.mesh import Mesh
    from shardscope.spec.job import Job


def check(mesh: Mesh, job: Job) -> None:
    """Reject uneven data axes, and models of the catalogue whose sequences or heads cannot be divided equally."""
    uneven = next(
        (name for name in ("replicas", "shards") if getattr(mesh.data, name, None) not in (None, 1)), None
    )
    if uneven is not None:
        raise SpecError(
            f"strategy.data.{uneven}={getattr(mesh.data, uneven)} is not available with "
            f"strategy.context={mesh.context} yet; leave {uneven} out"
        )
    if not isinstance(job.model, str):
        return  # ranks check it with an example
    transformer, comm = transformer_of(job.model), mesh.context_comm
    if transformer is None:
        raise SpecError(
            f"context={mesh.context} divides sequences, and model={job.model!r} has none; use a GPT, or context=1"
        )
    Layout(context=mesh.context).check(transformer)
    parts = parts_per_rank(comm)
    if transformer.seq % (parts * mesh.context):
        raise SpecError(
            f"context={mesh.context} with context_comm={comm!r} gives each rank {parts} parts of a sequence, but "
            f"{parts * mesh.context} does not divide seq={transformer.seq} of {job.model}; use context_comm='ulysses', "
            "or fewer context ranks"
        )
    heads = transformer.heads // mesh.tensor
    if comm == "ulysses" and heads % mesh.context:
        raise SpecError(
            f"context={mesh.context} does not divide the {heads} heads of a rank of {job.model}, as "
            f"context_comm='ulysses' requires; use one of {divisors_text(heads, near=mesh.context)}, or "
            "context_comm='all-gather' or 'ring'"
        )


def calls(mesh: Mesh, step: JobStep) -> list[tuple[When, Traffic]]:
    """Return the traffic of each collective of a context group in a step, as attention calls them."""
    return [
        (when, _traffic(op, num_bytes, mesh.context, step.backend))
        for when, op, num_bytes in messages_of("context", step)
    ]


def _traffic(op: str, num_bytes: int, size: int, backend: str) -> Traffic:
    """Return the traffic of one collective of `size` ranks, or of a message of each to the next."""
    import numpy as np

    from shardscope.analytic.communication.traffic import Sent, by_backend

    if op == "send":
        return {op: Sent(np.full(size, num_bytes), np.ones(size, dtype=np.int64))}
    return by_backend(op, num_bytes, size, backend=backend)
