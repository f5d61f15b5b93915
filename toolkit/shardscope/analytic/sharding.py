"""How ZeRO cuts tensors into shards: elements on each rank, by formula, padding by its name.

Stage 1 cuts flat buckets element by element (`shardscope.analytic.communication.chunk_sizes`): nothing is padded, and a
rank's share differs from another's by at most one element a bucket. Stages 2 and 3 are FSDP2's: every tensor is cut
along its first dimension into pieces of ``ceil(d0 / N)`` rows, and what the last ones lack is padded for communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import chunk_sizes

Ints = npt.NDArray[np.int64]
Shape = Sequence[int]


def bucket_elements(tensor_elements: Sequence[int], capacity: int) -> list[int]:
    """Elements of the flat buckets of ZeRO-1: tensors in reverse, up to `capacity` elements or one tensor a bucket."""
    buckets: list[int] = []
    for num_elements in reversed(tensor_elements):
        if not buckets or buckets[-1] + num_elements > capacity:
            buckets.append(0)
        buckets[-1] += num_elements
    return buckets


def flat_shard_elements(bucket_elements: Sequence[int], world_size: int) -> Ints:
    """Elements that each rank updates under ZeRO-1, over all buckets; shape `(W,)`, by rank."""
    total = np.zeros(world_size, dtype=np.int64)
    for num_elements in bucket_elements:
        total += chunk_sizes(num_elements, world_size)
    return total


def padded_elements(shape: Shape, num_shards: int) -> int:
    """Elements of a tensor once FSDP2 has padded its first dimension to a multiple of `num_shards`."""
    rows = math.ceil(shape[0] / num_shards) * num_shards
    return rows * math.prod(shape[1:])


def row_shard_elements(shapes: Sequence[Shape], num_shards: int) -> Ints:
    """Elements that each rank of a shard group holds of tensors cut along their first dimension; shape `(N,)`.

    Padding is left out: it is in FSDP2's buffers (`padded_elements`), not in gradients and optimizer state.
    """
    total = np.zeros(num_shards, dtype=np.int64)
    for shape in shapes:
        rows = math.ceil(shape[0] / num_shards)
        starts = np.minimum(rows * np.arange(num_shards + 1), shape[0])
        total += np.diff(starts) * math.prod(shape[1:])
    return total
