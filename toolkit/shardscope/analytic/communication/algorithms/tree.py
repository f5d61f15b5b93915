"""Tree algorithms: a binomial tree for whole messages, a pipelined binary tree for segments, double binary trees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardscope.analytic.communication.algorithms._algorithm import Algorithm, Option
from shardscope.analytic.communication.algorithms.ring import best_segments
from shardscope.analytic.communication.cost import CollectiveInput, Cost, Phase, log2_ceil, log2_floor
from shardscope.analytic.communication.ring import Floats, even_share_bytes
from shardscope.analytic.communication.tree import busiest_tree_messages

_PASSES = {"all_reduce": 2.0, "broadcast": 1.0, "reduce": 1.0}
_ADDS = {"all_reduce": 1.0, "broadcast": 0.0, "reduce": 1.0}


def _binomial(op: str) -> Callable[[CollectiveInput], Cost]:
    """Return the cost function of an operation over a binomial tree."""

    def cost(message: CollectiveInput) -> Cost:
        rounds, size = log2_ceil(message.workers), message.num_bytes
        carried = rounds * size
        sent = np.minimum(rounds, 1.0) * size if op == "reduce" else carried
        steps = _PASSES[op] * rounds
        return Cost((Phase("up and down the tree", steps, steps * size, _ADDS[op] * carried),), sent, carried)

    return cost


def _pipelined(op: str) -> Callable[..., Cost]:
    """Return the cost function of an operation over a pipelined binary tree."""

    def cost(message: CollectiveInput, segments: Floats | None) -> Cost:
        count, size = message.workers, message.num_bytes
        turns = np.clip(count - 1, 0.0, 2.0)  # a parent sends to its children one after the other
        period = busiest_tree_messages(count) if op == "all_reduce" else turns
        filling = _PASSES[op] * turns * log2_floor(count)
        hops = filling / np.maximum(period, 1.0)  # in units of the period, the tree is a pipeline
        pieces = (
            best_segments(size, hops, message.latency, 1 / message.bandwidth)
            if segments is None
            else segments
        )
        steps = filling + period * (pieces - 1)
        moved = steps * size / pieces
        carried = period * size
        sent = np.minimum(turns, 1.0) * size if op == "reduce" else carried
        added = _ADDS[op] * turns * (log2_floor(count) + pieces - 1) * size / pieces
        return Cost((Phase("segment by segment", steps, moved, added),), sent, carried)

    return cost


def _double(op: str) -> Callable[..., Cost]:
    """Return the cost function of an operation over two binary trees."""

    def cost(message: CollectiveInput, latency_factor: Floats, bandwidth_factor: Floats) -> Cost:
        count, size = message.workers, message.num_bytes
        share = even_share_bytes(size, count)
        once = np.where(count > 1, size, 0.0)
        carried = bandwidth_factor * (2 * share if op == "all_reduce" else once)
        steps = latency_factor * _PASSES[op] * log2_ceil(count)
        added = _ADDS[op] * (share if op == "all_reduce" else once)
        return Cost((Phase("over both trees", steps, carried, added),), carried, carried)

    return cost


TREE = Algorithm(
    title="tree",
    since=2005,
    source="Thakur, Rabenseifner and Gropp 2005, section 4 (binomial tree)",
    about="Workers combine tensors in pairs, then fours, ...: whole tensors move up in log2 W rounds and back down.",
    costs={op: _binomial(op) for op in _PASSES},
    formulas={
        "all_reduce": "2⌈log₂W⌉(α + S/B) + ⌈log₂W⌉ · S/γ",
        "broadcast": "⌈log₂W⌉(α + S/B)",
        "reduce": "⌈log₂W⌉(α + S/B + S/γ)",
    },
)
PIPELINED_TREE = Algorithm(
    title="pipelined tree",
    since=2009,
    source="Sanders, Speck and Träff 2009 (Parallel Computing 35); also implemented by Shardscope's `tree`",
    about="In a binary tree, parents forward segments while later ones arrive; a worker with two children sends 3 S.",
    costs={op: _pipelined(op) for op in _PASSES},
    formulas={
        "all_reduce": "(4⌊log₂W⌋ + 3(m−1))(α + S/(mB)) + 2(⌊log₂W⌋ + m−1) · S/(mγ)",
        "broadcast": "2(⌊log₂W⌋ + m−1)(α + S/(mB))",
        "reduce": "2(⌊log₂W⌋ + m−1)(α + S/(mB) + S/(mγ))",
    },
    options={"segments": Option(None, "number of segments of the tensor; None for the optimal number", 1)},
)
DOUBLE_TREE = Algorithm(
    title="double binary tree",
    since=2009,
    source="Sanders, Speck and Träff 2009; NCCL 2.4 (2019); in the limit of many segments",
    about="Each of two trees carries half the tensor; parents in one are leaves in the other, so all send equally.",
    costs={op: _double(op) for op in _PASSES},
    formulas={
        "all_reduce": "a · 2⌈log₂W⌉α + b · 2(W−1)/W · S/B + (W−1)/W · S/γ",
        "broadcast": "a · ⌈log₂W⌉α + b · S/B",
        "reduce": "a · ⌈log₂W⌉α + b · S/B + S/γ",
    },
    options={
        "latency_factor": Option(1.0, "a, relative to the ideal (mlsysim 0.3 uses 1.2)", 1, is_whole=False),
        "bandwidth_factor": Option(
            1.0, "b, relative to the ideal (mlsysim 0.3 uses 1.05)", 1, is_whole=False
        ),
    },
)
