"""How gradients are split: into buckets that are sent together, and with ZeRO into shards, with or without padding.

Replicas fill the buckets of `DistributedDataParallel` with whole tensors. ZeRO-1 splits flat buckets element by element
(`shardscope.analytic.communication.chunk_sizes`): nothing is padded, and the shares of two ranks differ by at most one
element per bucket. Stages 2 and 3 are FSDP2's: every tensor is split along its first dimension into pieces of
``ceil(d0 / N)`` rows, and the last pieces are padded for communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import chunk_sizes

Ints = npt.NDArray[np.int64]
Shape = Sequence[int]


def replica_buckets(
    shapes: Sequence[tuple[int, ...]], bucket_mb: float, *, element_bytes: int = 4
) -> list[list[tuple[int, ...]]]:
    """Shapes of the tensors in each bucket of `DistributedDataParallel`, in the order in which the buckets are sent.

    A bucket is closed after it reaches its size, so buckets are usually larger than that
    (``_compute_bucket_assignment_by_size`` in torch's reducer). ZeRO-1's buckets (`bucket_elements`) are larger only if
    a single tensor is. In its first step, `DistributedDataParallel` has only one bucket.

    Args:
        shapes: Shapes of the trained tensors, in the order in which their gradients are ready: the last layer's first.
        bucket_mb: Size of a bucket in MiB.
        element_bytes: Bytes of one gradient element.
    """
    capacity = int(bucket_mb * 2**20)
    buckets: list[list[tuple[int, ...]]] = []
    filled = capacity
    for shape in shapes:
        if filled >= capacity:
            buckets.append([])
            filled = 0
        buckets[-1].append(shape)
        filled += math.prod(shape) * element_bytes
    return buckets


def bucket_elements(tensor_elements: Sequence[int], capacity: int) -> list[int]:
    """Elements of each flat bucket of ZeRO-1: tensors in reverse order, up to `capacity` elements or one tensor."""
    buckets: list[int] = []
    for num_elements in reversed(tensor_elements):
        if not buckets or buckets[-1] + num_elements > capacity:
            buckets.append(0)
        buckets[-1] += num_elements
    return buckets


def flat_shard_elements(bucket_elements: Sequence[int], world_size: int, *, is_padded: bool = False) -> Ints:
    """Elements that each rank updates with ZeRO-1, over all buckets; shape `(W,)`, by rank.

    Args:
        bucket_elements: Elements of each flat bucket, without padding.
        world_size: W, the number of ranks.
        is_padded: Whether buckets are padded to equal shares; the padding, which no rank updates, is in the last ones.
    """
    total = np.zeros(world_size, dtype=np.int64)
    for num_elements in bucket_elements:
        if is_padded:
            share = math.ceil(num_elements / world_size)
            total += np.clip(num_elements - share * np.arange(world_size), 0, share)
        else:
            total += chunk_sizes(num_elements, world_size)
    return total


def flat_piece_elements(
    tensor_elements: Sequence[int], capacity: int, world_size: int, *, is_padded: bool = False
) -> Ints:
    """Elements of each tensor that each rank updates with ZeRO-1; shape `(tensors, W)`.

    Args:
        tensor_elements: Elements of each tensor, in the module's order.
        capacity: As for `bucket_elements`.
        world_size: W, the number of ranks.
        is_padded: As for `flat_shard_elements`.
    """
    found = np.zeros((len(tensor_elements), world_size), dtype=np.int64)
    places = reversed(range(len(tensor_elements)))
    for total in bucket_elements(tensor_elements, capacity):
        shares = chunk_sizes(-(-total // world_size) * world_size if is_padded else total, world_size)
        ends = np.cumsum(shares)
        start = 0
        while start < total:
            place = next(places)
            end = start + tensor_elements[place]
            found[place] = np.clip(np.minimum(ends, end) - np.maximum(ends - shares, start), 0, None)
            start = end
    return found


def padded_elements(shape: Shape, num_shards: int) -> int:
    """Elements of a tensor after FSDP2 has padded its first dimension to a multiple of `num_shards`.

    A scalar is replicated on every rank.
    """
    if not shape:
        return num_shards
    rows = math.ceil(shape[0] / num_shards) * num_shards
    return rows * math.prod(shape[1:])


def row_shard_elements(shapes: Sequence[Shape], num_shards: int) -> Ints:
    """Elements that each rank of a shard group holds of tensors split along their first dimension; shape `(N,)`.

    Scalars are replicated on every rank. Padding is not counted: it is in FSDP2's buffers (`padded_elements`), not in
    gradients and optimizer state.
    """
    total = np.zeros(num_shards, dtype=np.int64)
    for shape in shapes:
        if not shape:
            total += 1
            continue
        rows = math.ceil(shape[0] / num_shards)
        starts = np.minimum(rows * np.arange(num_shards + 1), shape[0])
        total += np.diff(starts) * math.prod(shape[1:])
    return total
