"""Bytes that ranks send in a hierarchical all-reduce, over rings inside and across nodes, by formula."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.ring import (
    Ints,
    chunk_sizes,
    ring_all_gather_bytes,
    ring_all_reduce_bytes,
    ring_reduce_scatter_bytes,
)


class HierarchicalBytes(NamedTuple):
    """Bytes that each rank sends in each phase of a hierarchical all-reduce; arrays of shape `(W,)`, by rank."""

    reduce_scatter: Ints
    """Bytes of the reduce-scatter inside the node."""
    across: Ints
    """Bytes of the all-reduce across nodes, sent to the rank with the same position in the next node."""
    all_gather: Ints
    """Bytes of the all-gather inside the node."""

    @property
    def inside(self) -> Ints:
        """Bytes that each rank sends inside its node."""
        sent: Ints = self.reduce_scatter + self.all_gather
        return sent

    @property
    def total(self) -> Ints:
        """Bytes that each rank sends in all. The sum over all W ranks is exactly 2(W-1) S for a tensor of S bytes."""
        sent: Ints = self.inside + self.across
        return sent


def hierarchical_all_reduce_bytes(
    num_elements: int, element_bytes: int, world_size: int, per_node: int
) -> HierarchicalBytes:
    """Return the bytes that each rank sends in a hierarchical all-reduce.

    For a tensor of S bytes on n nodes of m ranks, a rank sends 2(m-1)/m S inside its node and 2(n-1)/n S/m across
    nodes.

    Args:
        num_elements: Number of elements in the tensor.
        element_bytes: Bytes of one element.
        world_size: W, the number of ranks.
        per_node: m, the number of ranks per node; must divide `world_size`.
    """
    num_nodes = world_size // per_node
    scatter = ring_reduce_scatter_bytes(num_elements, element_bytes, per_node)
    gather = ring_all_gather_bytes(num_elements, element_bytes, per_node)
    shards = chunk_sizes(num_elements, per_node).tolist()
    across = np.stack([ring_all_reduce_bytes(shard, element_bytes, num_nodes) for shard in shards], axis=1)
    return HierarchicalBytes(np.tile(scatter, num_nodes), across.reshape(-1), np.tile(gather, num_nodes))
