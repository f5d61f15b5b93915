"""The context axis of a mesh: what it refuses, and the collectives of attention over parts of sequences in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.errors import SpecError
from shardscope.methods.strategies.mesh.messages import collectives_of, traffic_of
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
    """Reject uneven shards, ranks with weights of their own, and models of the catalogue that cannot be divided."""
    if job.compression.period > 1:
        raise SpecError(
            f"compression={job.compression.name!r} cannot be combined with strategy.context={mesh.context}: each rank "
            "trains its own parameters for several steps, but ranks attend to each other's keys and values; use "
            "another method, such as 'topk', or context=1"
        )
    shards = mesh.data.settings.get("shards")
    if shards is not None:
        raise SpecError(
            f"strategy.data.shards={shards} is not available with strategy.context={mesh.context} yet; leave shards out"
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
        (when, traffic_of(op, num_bytes, mesh.context, step.backend))
        for when, op, num_bytes in collectives_of("context", step)
    ]
