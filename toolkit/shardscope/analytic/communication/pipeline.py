"""Bytes that ranks of a pipeline send: activations, their gradients, and the gradients of tied parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shardscope.analytic.communication.ring import Ints, ring_all_reduce_bytes
from shardscope.analytic.communication.traffic import Sent, Traffic, by_ring


def pipeline_bytes(boundary_bytes: Sequence[int], stage_ranks: Sequence[int], microbatches: int) -> Ints:
    """Return the bytes that each rank sends in a step; shape `(W,)`, by rank.

    For every micro-batch, activations are sent once across every boundary between stages, and gradients of the same
    size are sent back. Nothing is sent across a boundary between two stages of the same rank.

    Args:
        boundary_bytes: Bytes of one micro-batch's output activations, for each stage except the last.
        stage_ranks: The rank that holds each stage.
        microbatches: Number of micro-batches in a step.

    Example:
        >>> pipeline_bytes([100, 100], stage_ranks=[0, 1, 2], microbatches=4).tolist()
        [400, 800, 400]
    """
    sent = np.zeros(max(stage_ranks) + 1, dtype=np.int64)
    for num_bytes, (before, after) in zip(boundary_bytes, pairwise(stage_ranks), strict=True):
        if before != after:
            sent[before] += num_bytes * microbatches
            sent[after] += num_bytes * microbatches
    return sent


def tied_bytes(num_elements: int, element_bytes: int, holders: Sequence[int], world_size: int) -> Ints:
    """Return the bytes that each rank sends to sum the gradients of one tied parameter; shape `(W,)`, by rank.

    A tied parameter is used by several stages, so several ranks hold it. These ranks run a ring all-reduce; if there
    are two, each sends the whole gradient once.

    Args:
        num_elements: Number of elements in the parameter.
        element_bytes: Bytes of one element.
        holders: The ranks that hold the parameter.
        world_size: W, the number of ranks.
    """
    sent = np.zeros(world_size, dtype=np.int64)
    sent[list(holders)] = ring_all_reduce_bytes(num_elements, element_bytes, len(holders))
    return sent


def pipeline_traffic(
    boundary_bytes: Sequence[int],
    stage_ranks: Sequence[int],
    microbatches: int,
    *,
    bounds: tuple[int, int] | None = None,
) -> Traffic:
    """Return the traffic of each rank in a step: one message per micro-batch, boundary and direction.

    Args:
        boundary_bytes: Bytes of one micro-batch's output activations, for each stage except the last.
        stage_ranks: The rank that holds each stage.
        microbatches: Number of micro-batches in a step.
        bounds: Minimum and maximum bytes that one micro-batch sends across a boundary, if it is not known in advance
            where stages begin; None if `boundary_bytes` is exact.
    """
    sent = pipeline_bytes(boundary_bytes, stage_ranks, microbatches)
    messages = pipeline_bytes([1] * len(boundary_bytes), stage_ranks, microbatches)
    between = None if bounds is None else (messages * bounds[0], messages * bounds[1])
    return {"send": Sent(sent, messages, between)}


def tied_traffic(num_elements: int, element_bytes: int, holders: Sequence[int], world_size: int) -> Traffic:
    """Return the traffic of each rank for summing the gradients of one tied parameter, as in `tied_bytes`."""
    ring = by_ring("all_reduce", num_elements, element_bytes, len(holders))["ring_all_reduce"]
    messages = np.zeros(world_size, dtype=np.int64)
    messages[list(holders)] = ring.messages
    return {"ring_all_reduce": Sent(tied_bytes(num_elements, element_bytes, holders, world_size), messages)}
