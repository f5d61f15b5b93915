"""Recursive doubling and halving: log2 W rounds, in which each worker's partner is 1, 2, 4, ... ranks away."""

from __future__ import annotations

import numpy as np

from shardscope.analytic.communication.algorithms._algorithm import Algorithm
from shardscope.analytic.communication.cost import CollectiveInput, Cost, Phase, log2_ceil, log2_floor
from shardscope.analytic.communication.ring import Floats, even_share_bytes
from shardscope.errors import SpecError

_THAKUR = "Thakur, Rabenseifner and Gropp 2005, section 4"


def _has_leftover_ranks(workers: Floats) -> Floats:
    """Return 1 if W is not a power of two, else 0.

    The ranks in excess of the largest power of two first send their data to a neighbour, which returns the result at
    the end.
    """
    extra: Floats = np.where(log2_floor(workers) == log2_ceil(workers), 0.0, 1.0)
    return extra


def _halve_and_double(message: CollectiveInput) -> Cost:
    """Return the cost of an all-reduce by recursive halving and doubling."""
    extra, size = _has_leftover_ranks(message.workers), message.num_bytes
    share = even_share_bytes(size, message.workers)
    steps = 2 * (log2_floor(message.workers) + extra)
    moved = 2 * (share + extra * size)
    return Cost((Phase("halve, then double", steps, moved, share + extra * size),), moved, moved)


def _halve(message: CollectiveInput) -> Cost:
    """Return the cost of a reduce-scatter by recursive halving."""
    extra, size = _has_leftover_ranks(message.workers), message.num_bytes
    share = even_share_bytes(size, message.workers)
    steps = log2_floor(message.workers) + 2 * extra
    moved = np.where(extra > 0, 2 * size, share)
    return Cost((Phase("halve", steps, moved, share + extra * size),), moved, moved)


def _double(message: CollectiveInput) -> Cost:
    """Return the cost of an all-gather by recursive doubling.

    Raises:
        SpecError: The number of workers is not a power of two.
    """
    odd = message.workers[np.asarray(_has_leftover_ranks(message.workers), dtype=bool)]
    if odd.size:
        raise SpecError(
            f"workers={odd.flat[0]:.0f} is not a power of two, which recursive-doubling's all_gather needs; "
            f"use algorithm='bruck' or 'ring'"
        )
    share = even_share_bytes(message.num_bytes, message.workers)
    return Cost((Phase("double", log2_floor(message.workers), share),), share, share)


def _double_whole(message: CollectiveInput) -> Cost:
    """Return the cost of an all-reduce by recursive doubling of whole tensors."""
    rounds, extra = log2_floor(message.workers), _has_leftover_ranks(message.workers)
    steps = rounds + 2 * extra
    moved = steps * message.num_bytes
    added = (rounds + extra) * message.num_bytes
    sent = (rounds + extra) * message.num_bytes
    return Cost((Phase("exchange whole tensors", steps, moved, added),), sent, sent)


HALVING_DOUBLING = Algorithm(
    title="halving-doubling",
    since=2004,
    source=f"Rabenseifner 2004; {_THAKUR}, which slightly overestimates the bytes unless the number of ranks p is a "
    "power of two, because it counts p ranks although only 2^⌊lg p⌋ exchange data",
    about="Partners exchange halves, then quarters, ...: a reduce-scatter in log2 W rounds, then the reverse.",
    costs={"all_reduce": _halve_and_double, "reduce_scatter": _halve},
    formulas={
        "all_reduce": "2⌊log₂W⌋α + 2(W−1)/W · S/B + (W−1)/W · S/γ; if not a power of two: + 2α + 2 S/B + S/γ",
        "reduce_scatter": "⌊log₂W⌋α + (W−1)/W · S/B + (W−1)/W · S/γ; if not a power of two: + 2α + (W+1)/W · S/B "
        "+ S/γ",
    },
)
RECURSIVE_DOUBLING = Algorithm(
    title="recursive doubling",
    since=2005,
    source=_THAKUR,
    about="Partners 1, 2, 4, ... ranks away exchange all their data: the fewest rounds, so it suits short messages.",
    costs={"all_reduce": _double_whole, "all_gather": _double},
    formulas={
        "all_reduce": "⌊log₂W⌋(α + S/B + S/γ); if not a power of two: + 2(α + S/B) + S/γ",
        "all_gather": "log₂W · α + (W−1)/W · S/B",
    },
)
