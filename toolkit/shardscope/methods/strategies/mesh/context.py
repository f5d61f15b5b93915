"""What the context axis of a mesh adds: which jobs it can train, and the traffic of its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.errors import SpecError
from shardscope.spec.context_comm import ContextComm, parts_per_rank
from shardscope.spec.divisors import divisors_text
from shardscope.spec.layout import Layout
from shardscope.spec.models import transformer_of

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.spec.job import Job


def check_model(job: Job, *, context: int, comm: ContextComm, tensor: int) -> None:
    """Reject a model of the catalogue whose sequences or heads cannot be divided equally.

    Raises:
        SpecError: They cannot; the message states the field, its value and a remedy.
    """
    if not isinstance(job.model, str):
        return  # ranks check it with an example
    transformer = transformer_of(job.model)
    if transformer is None:
        raise SpecError(
            f"context={context} divides sequences, and model={job.model!r} has none; use a GPT, or context=1"
        )
    Layout(context=context).check(transformer)
    parts = parts_per_rank(comm)
    if transformer.seq % (parts * context):
        raise SpecError(
            f"context={context} with context_comm={comm!r} gives each rank {parts} parts of a sequence, but "
            f"{parts * context} does not divide seq={transformer.seq} of {job.model}; use context_comm='ulysses', or "
            "fewer context ranks"
        )
    heads = transformer.heads // tensor
    if comm == "ulysses" and heads % context:
        raise SpecError(
            f"context={context} does not divide the {heads} heads of a rank of {job.model}, as context_comm='ulysses' "
            f"requires; use one of {divisors_text(heads, near=context)}, or context_comm='all-gather' or 'ring'"
        )


def message_traffic(op: str, num_bytes: int, size: int, *, backend: str) -> Traffic:
    """Return the traffic of one collective of a group of `size` ranks, or of a message of each to the next."""
    import numpy as np

    from shardscope.analytic.communication.traffic import Sent, by_backend

    if op == "send":
        return {op: Sent(np.full(size, num_bytes), np.ones(size, dtype=np.int64))}
    return by_backend(op, num_bytes, size, backend=backend)
