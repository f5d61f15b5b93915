"""Bytes on the wire of the binary tree, by formula."""

from __future__ import annotations

import numpy as np

from shardscope.analytic.communication.ring import Ints


def tree_all_reduce_bytes(num_elements: int, element_bytes: int, world_size: int) -> Ints:
    """Bytes that each rank sends in a tree all-reduce; shape `(W,)`, by rank.

    The whole tensor goes up once to the parent (r-1) // 2, and down once to each of the children 2r+1 and 2r+2 that
    there are. The sum is 2(W-1) S, exactly; the busiest ranks send 3 S.

    Args:
        num_elements: Elements of the tensor.
        element_bytes: Bytes of one element.
        world_size: Ranks in the tree.
    """
    rank = np.arange(world_size, dtype=np.int64)
    parents = (rank > 0).astype(np.int64)
    children = (2 * rank + 1 < world_size).astype(np.int64) + (2 * rank + 2 < world_size)
    sent: Ints = (parents + children) * num_elements * element_bytes
    return sent
