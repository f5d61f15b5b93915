"""Bytes that a pipeline sends between ranks: activations, their gradients, and gradients of shared parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shardscope.analytic.communication.ring import Ints, ring_all_reduce_bytes
from shardscope.analytic.communication.traffic import Sent, Traffic, by_ring


def pipeline_bytes(boundary_bytes: Sequence[int], stage_ranks: Sequence[int], microbatches: int) -> Ints:
    """Bytes that each rank sends in a step: shape `(W,)`, by rank.

    Every micro-batch sends activations across every boundary once, and gradients of the same size back. A boundary
    between two stages of the same rank sends nothing.

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
    """Bytes that each rank sends to sum the gradients of one parameter that several ranks hold; shape `(W,)`.

    The holders form a ring; if there are two, each sends the whole gradient once.
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
    """Traffic of each rank in a step: one message for each micro-batch, boundary and direction.

    Args:
        boundary_bytes: As for `pipeline_bytes`.
        stage_ranks: The rank that holds each stage.
        microbatches: Number of micro-batches in a step.
        bounds: Minimum and maximum bytes that cross a boundary, if the exact boundaries are not known in advance.
    """
    sent = pipeline_bytes(boundary_bytes, stage_ranks, microbatches)
    messages = pipeline_bytes([1] * len(boundary_bytes), stage_ranks, microbatches)
    between = None if bounds is None else (messages * bounds[0], messages * bounds[1])
    return {"send": Sent(sent, messages, between)}


def tied_traffic(num_elements: int, element_bytes: int, holders: Sequence[int], world_size: int) -> Traffic:
    """Traffic of each rank for summing the gradients of one parameter that several ranks hold."""
    ring = by_ring("all_reduce", num_elements, element_bytes, len(holders))["ring_all_reduce"]
    messages = np.zeros(world_size, dtype=np.int64)
    messages[list(holders)] = ring.messages
    return {"ring_all_reduce": Sent(tied_bytes(num_elements, element_bytes, holders, world_size), messages)}
