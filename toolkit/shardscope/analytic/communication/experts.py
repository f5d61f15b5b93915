"""Bytes of the all-to-alls that send tokens to the experts of other ranks and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import Ints

_COUNT_BYTES = 8
"""Bytes of the number of tokens for one expert; ranks exchange these numbers before the tokens."""


class AllToAlls(NamedTuple):
    """Bytes that each rank of an expert group sends to each in each all-to-all of layers with experts.

    Arrays of shape `(ranks, ranks)`, by sender and receiver, in which no rank sends to itself. The first three are
    those of a forward pass, the last two those of a backward pass.
    """

    counts: Ints
    """Numbers of the tokens for each expert."""
    tokens: Ints
    """Tokens, to the ranks of their experts."""
    outputs: Ints
    """Outputs of experts, back to the ranks of the tokens."""
    of_outputs: Ints
    """Gradients of outputs."""
    of_tokens: Ints
    """Gradients of tokens."""


def all_to_alls(
    loads: Sequence[Sequence[float]] | Ints,
    *,
    hidden: int,
    element_bytes: int,
    output_bytes: int | None = None,
) -> AllToAlls:
    """Return the bytes that ranks of an expert group send in the all-to-alls of one layer and micro-batch.

    A token goes to the ranks of its experts and its outputs come back; in the backward pass, the gradients take the
    same ways (GShard, arXiv 2006.16668, section 3.3).

    Args:
        loads: Choices that are kept, by rank and expert; rank r of n holds experts ``r E / n`` to ``(r + 1) E / n``.
        hidden: Number of elements of a token.
        element_bytes: Bytes of an element of a token.
        output_bytes: Bytes of an element of an expert's output; None if they are the same.
    """
    sent = np.asarray(loads, np.int64)
    ranks, experts = sent.shape
    between = sent.reshape(ranks, ranks, -1).sum(-1)  # tokens from a rank to a rank
    away = between - np.diag(np.diag(between))
    there, back = hidden * element_bytes, hidden * (output_bytes or element_bytes)
    counts = experts // ranks * _COUNT_BYTES * (1 - np.eye(ranks, dtype=np.int64))
    return AllToAlls(counts, away * there, away.T * back, away * back, away.T * there)


def all_to_all_bytes(
    loads: Sequence[Sequence[Sequence[float]]] | Ints,
    *,
    hidden: int,
    element_bytes: int,
    output_bytes: int | None = None,
    micro_batches: int = 1,
    forward_passes: int = 1,
) -> npt.NDArray[np.int64]:
    """Return the bytes that each rank of an expert group sends in a step, to the other ranks of the group.

    They are the sums of `all_to_alls`. Exact for the loads that a run records.

    Args:
        loads: Choices that are kept, by rank, layer and expert, over a step.
        hidden: Number of elements of a token.
        element_bytes: Bytes of an element of a token.
        output_bytes: Bytes of an element of an expert's output; None if they are the same.
        micro_batches: Number of micro-batches of a step.
        forward_passes: Number of forward passes of a micro-batch; 2 if layers are recomputed as a whole.

    Example:
        >>> all_to_all_bytes([[[3, 1]], [[2, 2]]], hidden=1, element_bytes=1).tolist()
        [14, 14]
    """
    sent = np.asarray(loads, np.int64)
    each = all_to_alls(sent.sum(1), hidden=hidden, element_bytes=element_bytes, output_bytes=output_bytes)
    told = each.counts * sent.shape[1] * micro_batches
    forward = forward_passes * (told + each.tokens + each.outputs)
    return np.asarray((forward + each.of_outputs + each.of_tokens).sum(1))
