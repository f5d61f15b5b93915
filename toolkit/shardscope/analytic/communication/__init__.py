"""Bytes on the wire, by formula: a module for each way of moving them."""

from shardscope.analytic.communication.all_reduce import all_reduce_bytes
from shardscope.analytic.communication.ring import (
    chunk_sizes,
    ring_all_gather_bytes,
    ring_all_reduce_bytes,
    ring_reduce_scatter_bytes,
)

__all__ = [
    "all_reduce_bytes", "chunk_sizes", "ring_all_gather_bytes", "ring_all_reduce_bytes", "ring_reduce_scatter_bytes",
]  # fmt: skip
