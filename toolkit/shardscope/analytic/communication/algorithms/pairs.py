"""Algorithms that exchange blocks between two workers: pairwise, Bruck, scatter plus all-gather, and one message."""

from __future__ import annotations

import numpy as np

from shardscope.analytic.communication.algorithms._algorithm import Algorithm
from shardscope.analytic.communication.cost import CollectiveInput, Cost, Phase, log2_ceil
from shardscope.analytic.communication.ring import Floats, even_share_bytes


def _pairwise(message: CollectiveInput) -> Cost:
    share = even_share_bytes(message.num_bytes, message.workers)
    return Cost((Phase("with each other worker in turn", message.workers - 1, share),), share, share)


def _bruck_all_to_all(message: CollectiveInput) -> Cost:
    moved = message.num_bytes / message.workers * _set_bits(message.workers)
    return Cost((Phase("1, 2, 4, ... ranks away", log2_ceil(message.workers), moved),), moved, moved)


def _bruck_all_gather(message: CollectiveInput) -> Cost:
    share = even_share_bytes(message.num_bytes, message.workers)
    return Cost((Phase("1, 2, 4, ... ranks away", log2_ceil(message.workers), share),), share, share)


def _set_bits(workers: Floats) -> Floats:
    """Return the number of 1 bits in all binary numbers below W: the number of blocks that a worker sends.

    In Bruck's all-to-all, the block for the worker d ranks away is sent once for each 1 bit in d.
    """
    count = np.asarray(workers, dtype=np.int64)
    total = np.zeros(count.shape, dtype=np.int64)
    for bit in range(int(count.max()).bit_length()):
        whole, rest = count >> (bit + 1), count & ((2 << bit) - 1)
        total += (whole << bit) + np.maximum(rest - (1 << bit), 0)
    return total.astype(np.float64)


def _direct(message: CollectiveInput) -> Cost:
    several = np.where(message.workers > 1, 1.0, 0.0)
    moved = several * message.num_bytes
    return Cost((Phase("one message", several, moved),), moved, moved)


def _scatter_gather(message: CollectiveInput) -> Cost:
    share = even_share_bytes(message.num_bytes, message.workers)
    steps = log2_ceil(message.workers) + message.workers - 1
    return Cost((Phase("scatter, then all-gather", steps, 2 * share),), 2 * share, 2 * share)


_THAKUR = "Thakur, Rabenseifner and Gropp 2005, section 4"
PAIRWISE = Algorithm(
    title="pairwise",
    since=2005,
    source=_THAKUR,
    about="In each of W-1 rounds, every worker exchanges one block with a different partner.",
    costs={"all_to_all": _pairwise},
    formulas={"all_to_all": "(W−1)α + (W−1)/W · S/B"},
)
BRUCK = Algorithm(
    title="Bruck",
    since=1997,
    source=f"Bruck et al. 1997; {_THAKUR}",
    about="Blocks are sent 1, 2, 4, ... ranks ahead: few rounds, but an all-to-all sends most blocks several times.",
    costs={"all_to_all": _bruck_all_to_all, "all_gather": _bruck_all_gather},
    formulas={
        "all_to_all": "⌈log₂W⌉α + b/W · S/B,  b = 1 bits of all numbers below W (W/2 · log₂W for a power of two)",
        "all_gather": "⌈log₂W⌉α + (W−1)/W · S/B",
    },
)
DIRECT = Algorithm(
    title="one message",
    since=1994,
    source="Hockney 1994",
    about="One worker sends, another receives.",
    costs={"send_recv": _direct},
    formulas={"send_recv": "α + S/B"},
)
SCATTER_GATHER = Algorithm(
    title="scatter and all-gather",
    since=1994,
    source=f"van de Geijn 1994; {_THAKUR}",
    about="The root scatters 1/W of the tensor to each worker, then all workers all-gather; suits long messages.",
    costs={"broadcast": _scatter_gather},
    formulas={"broadcast": "(⌈log₂W⌉ + W−1)α + 2(W−1)/W · S/B"},
)
