"""Gossip averaging with ring neighbours, by formula: the bytes sent, and how fast parameters approach their mean."""

from __future__ import annotations

import numpy as np

from shardscope.analytic.communication.traffic import MIB, Sent, Traffic, by_backend, together


def gossip_mix_bytes(num_bytes: int, world_size: int) -> int:
    """Return the bytes that each rank sends in one averaging step: `num_bytes` of parameters to each neighbour."""
    return num_bytes * min(2, world_size - 1)


def mix_traffic(
    num_elements: int,
    element_bytes: int,
    world_size: int,
    *,
    packet_bytes: int | None = None,
    slice_mb: float = 4.0,
) -> Traffic:
    """Return the traffic of each rank in one averaging step.

    A rank sends all its parameters to each neighbour, in slices. With compression, it sends one packet instead: the
    difference between its parameters and the copy of them that its neighbours have.

    Args:
        num_elements: Number of elements in all parameters.
        element_bytes: Bytes of one element.
        world_size: W, the number of ranks.
        packet_bytes: Bytes of the packet; None without compression.
        slice_mb: Maximum size of a slice in MiB.
    """
    size = num_elements * element_bytes if packet_bytes is None else packet_bytes
    slices = -(-num_elements // max(1, int(slice_mb * MIB) // element_bytes)) if packet_bytes is None else 1
    sent = gossip_mix_bytes(size, world_size)
    messages = gossip_mix_bytes(slices, world_size)
    name = "gossip_mix" if packet_bytes is None else "gossip_packets"
    return {name: Sent(np.full(world_size, sent), np.full(world_size, messages))}


def consensus_traffic(num_bytes: int, world_size: int) -> Traffic:
    """Return each rank's traffic to measure how far the ranks' parameters are from their mean.

    The measurement consists of an all-reduce of the parameters and one of a single number.
    """
    sums = (by_backend("all_reduce", size, world_size)["all_reduce"] for size in (num_bytes, 8))
    return together({"consensus": sent} for sent in sums)


def gossip_contraction(world_size: int) -> float:
    """Return an upper bound on the factor by which one averaging step multiplies parameters' distance from their mean.

    It is the second largest absolute eigenvalue of the mixing matrix, which is circulant and has weights of 1/3. The
    eigenvalues are (1 + 2 cos(2 pi k / W)) / 3 for W ranks and k = 1 .. W-1 (Lian et al. 2017, assumption 1; Xiao and
    Boyd 2004). Two or three ranks reach their mean in one step.

    Example:
        >>> [round(gossip_contraction(world_size), 3) for world_size in (2, 3, 4, 8)]
        [0.0, 0.0, 0.333, 0.805]
    """
    if world_size <= 3:  # all ranks are neighbours
        return 0.0
    angles = 2 * np.pi * np.arange(1, world_size) / world_size
    return float(np.abs(1 + 2 * np.cos(angles)).max() / 3)
