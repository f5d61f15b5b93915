"""Ring algorithms in one or both directions, and the pipelined chain for broadcast and reduce."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardscope.analytic.communication.algorithms._algorithm import Algorithm, Option
from shardscope.analytic.communication.cost import CollectiveInput, Cost, Phase
from shardscope.analytic.communication.ring import RING_PASSES, Floats, even_share_bytes

_REDUCES = {"all_reduce": 1.0, "reduce_scatter": 1.0, "all_gather": 0.0, "reduce": 1.0, "broadcast": 0.0}
_SOURCE = "Patarasuk and Yuan 2009 (JPDC 69); Thakur, Rabenseifner and Gropp 2005, section 4"


def best_segments(num_bytes: Floats, hops: Floats, latency: Floats, seconds_per_byte: Floats) -> Floats:
    """Return m, the number of segments that minimises the time of a pipeline with `hops` + m - 1 steps.

    The optimum is sqrt((hops - 1) S / (α B)), rounded to the better of the two nearest integers, with at least one
    segment and at least one byte per segment.

    Args:
        num_bytes: S, the size of the message.
        hops: Number of links through which every segment passes.
        latency: α, in seconds.
        seconds_per_byte: 1/B, the inverse of the bandwidth.
    """
    filling = np.maximum(hops - 1, 0.0) * num_bytes * seconds_per_byte
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        free = np.where(filling > 0, np.sqrt(filling / latency), 1.0)
    most = np.maximum(np.floor(num_bytes), 1.0)
    low = np.clip(np.floor(free), 1.0, most)
    high = np.minimum(low + 1, most)
    at_low, at_high = ((hops - 1 + m) * (latency + num_bytes * seconds_per_byte / m) for m in (low, high))
    best: Floats = np.where(at_high < at_low, high, low)
    return best


def _around(op: str, directions: int) -> Callable[[CollectiveInput], Cost]:
    """Return the cost function of an operation over a ring in one or both directions."""

    def cost(message: CollectiveInput) -> Cost:
        passes = RING_PASSES[op]
        share = even_share_bytes(message.num_bytes, message.workers)
        steps = passes * (message.workers - 1)
        carried = passes * share / directions
        return Cost(
            (Phase("around the ring", steps, carried, _REDUCES[op] * share),), passes * share, carried
        )

    return cost


def _chain(op: str) -> Callable[..., Cost]:
    """Return the cost function of an operation over a pipelined chain."""

    def cost(message: CollectiveInput, segments: Floats | None) -> Cost:
        hops = message.workers - 1
        count = (
            best_segments(message.num_bytes, hops, message.latency, 1 / message.bandwidth)
            if segments is None
            else segments
        )
        several = np.where(hops > 0, 1.0, 0.0)
        steps = several * (hops - 1 + count)
        size = steps * message.num_bytes / count
        once = several * message.num_bytes
        return Cost((Phase("along the chain", steps, size, _REDUCES[op] * size),), once, once)

    return cost


RING = Algorithm(
    title="ring",
    since=2009,
    source=_SOURCE,
    about="Every worker sends 1/W of the tensor to its neighbour, in W-1 rounds that sum and W-1 that distribute.",
    costs={op: _around(op, 1) for op in ("all_reduce", "reduce_scatter", "all_gather")},
    formulas={
        "all_reduce": "2(W−1)α + 2(W−1)/W · S/B + (W−1)/W · S/γ",
        "reduce_scatter": "(W−1)α + (W−1)/W · S/B + (W−1)/W · S/γ",
        "all_gather": "(W−1)α + (W−1)/W · S/B",
    },
)
CHAIN = Algorithm(
    title="pipelined chain",
    since=1995,
    source="Watts and van de Geijn 1995; van de Geijn 1994 (no broadcast takes less than S/B)",
    about="The tensor is sent from worker to worker in segments, so that all links are busy at the same time.",
    costs={op: _chain(op) for op in ("broadcast", "reduce")},
    formulas={
        "broadcast": "(W−2+m)(α + S/(mB))",
        "reduce": "(W−2+m)(α + S/(mB) + S/(mγ))",
    },
    options={"segments": Option(None, "number of segments of the tensor; None for the optimal number", 1)},
)
BIDIRECTIONAL_RING = Algorithm(
    title="ring, both directions",
    since=2009,
    source=_SOURCE + "; Jouppi et al. 2020 (TPU links carry both directions at once)",
    about="The two halves of the tensor go around the ring in opposite directions, in half the time if each "
    "neighbour has its own link, as on a torus; B is the bandwidth of one link. With a single network card per "
    "worker, nothing is gained.",
    costs={op: _around(op, 2) for op in ("all_reduce", "reduce_scatter", "all_gather")},
    formulas={
        "all_reduce": "2(W−1)α + (W−1)/W · S/B + (W−1)/W · S/γ",
        "reduce_scatter": "(W−1)α + (W−1)/W · S/(2B) + (W−1)/W · S/γ",
        "all_gather": "(W−1)α + (W−1)/W · S/(2B)",
    },
)
