"""Bytes that ranks send in an all-reduce over a binary tree, by formula."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import Floats, Ints


def tree_all_reduce_bytes(num_elements: int, element_bytes: int, world_size: int) -> Ints:
    """Return the bytes that each rank sends in a tree all-reduce; shape `(W,)`, by rank.

    Rank r sends the whole tensor of S bytes once up to its parent (r-1) // 2, and once down to each of its children
    2r+1 and 2r+2, if they exist. The sum over ranks is exactly 2(W-1) S; a rank with two children and a parent sends
    3 S.

    Args:
        num_elements: Number of elements in the tensor.
        element_bytes: Bytes of one element.
        world_size: W, the number of ranks in the tree.
    """
    messages = _messages(np.arange(world_size, dtype=np.int64), np.int64(world_size))
    sent: Ints = messages * num_elements * element_bytes
    return sent


def busiest_tree_messages(workers: npt.ArrayLike) -> Floats:
    """Return how many times the busiest worker sends the whole tensor in a tree all-reduce; shape of `workers`.

    The busiest worker is the root or the root's first child, because no rank further down has more children.
    """
    count = np.asarray(workers, dtype=np.int64)
    second = np.where(count > 1, _messages(np.int64(1), count), 0)
    busiest: Floats = np.maximum(_messages(np.int64(0), count), second).astype(np.float64)
    return busiest


def _messages(rank: Ints | np.int64, workers: Ints | np.int64) -> Ints:
    """Return the number of a rank's neighbours in the tree: its parent and its children, if they exist."""
    children = (2 * rank + 1 < workers).astype(np.int64) + (2 * rank + 2 < workers)
    messages: Ints = (rank > 0).astype(np.int64) + children
    return messages
