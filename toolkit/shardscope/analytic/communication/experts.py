"""Bytes of the all-to-alls that send tokens to the experts of other ranks and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_COUNT_BYTES = 8
"""Bytes of the number of tokens for one expert; ranks exchange these numbers before the tokens."""


def all_to_all_bytes(
    loads: Sequence[Sequence[Sequence[float]]],
    *,
    hidden: int,
    element_bytes: int,
    micro_batches: int = 1,
    forward_passes: int = 1,
) -> npt.NDArray[np.int64]:
    """Return the bytes that each rank of an expert group sends in a step, to the other ranks of the group.

    In a forward pass, a token goes to the ranks of its experts and its outputs come back; in the backward pass, the
    gradients take the same routes (GShard, arXiv 2006.16668, section 3.3). Exact for the loads that a run records.

    Args:
        loads: Choices that are kept, by rank, layer and expert, over a step; rank r of n holds experts ``r E / n`` to
            ``(r + 1) E / n``.
        hidden: Number of elements of a token.
        element_bytes: Bytes of an element.
        micro_batches: Number of micro-batches of a step.
        forward_passes: Number of forward passes of a micro-batch; 2 if layers are recomputed as a whole.

    Example:
        >>> all_to_all_bytes([[[3, 1]], [[2, 2]]], hidden=1, element_bytes=1).tolist()
        [14, 14]
    """
    sent = np.asarray(loads, np.int64)
    ranks, layers, experts = sent.shape
    between = sent.sum(1).reshape(ranks, ranks, -1).sum(-1)  # tokens from a rank to a rank
    away = between - np.diag(np.diag(between))
    tokens = (away.sum(1) + away.sum(0)) * (forward_passes + 1)  # to experts, and outputs back to their ranks
    counts = (ranks - 1) * experts // ranks * _COUNT_BYTES * layers * micro_batches * forward_passes
    return np.asarray(tokens * hidden * element_bytes + counts)
