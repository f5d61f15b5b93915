"""Bytes sent by the backend's all-reduce (gloo or NCCL)."""

from __future__ import annotations


def all_reduce_bytes(num_bytes: int, world_size: int) -> int:
    """Return the bytes that all W ranks together send in a bandwidth-optimal all-reduce of S bytes: 2(W-1) S."""
    return 2 * (world_size - 1) * num_bytes
