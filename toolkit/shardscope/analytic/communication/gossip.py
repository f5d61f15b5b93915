"""Gossip with ring neighbours, by formula: its bytes, and how fast the ranks come together."""

from __future__ import annotations

import numpy as np


def gossip_mix_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends in one averaging of `num_bytes` of parameters: all of them to each neighbour."""
    return num_bytes * min(2, world_size - 1)


def gossip_contraction(world_size: int) -> float:
    """The factor by which averaging once shrinks the ranks' distance from their mean, at least: |lambda_2|.

    The second largest absolute eigenvalue of the mixing matrix, a circulant: (1 + 2 cos(2 pi k / W)) / 3, k = 1 .. W-1,
    with weights of 1/3; two ranks average at once (Lian et al. 2017, assumption 1; Xiao and Boyd 2004).

    Example:
        >>> [round(gossip_contraction(world_size), 3) for world_size in (2, 3, 4, 8)]
        [0.0, 0.0, 0.333, 0.805]
    """
    if world_size <= 3:  # everybody is a neighbour of everybody
        return 0.0
    angles = 2 * np.pi * np.arange(1, world_size) / world_size
    return float(np.abs(1 + 2 * np.cos(angles)).max() / 3)
