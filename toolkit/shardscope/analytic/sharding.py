"""Grouping of gradients into buckets, and ZeRO's division of tensors into shards.

`DistributedDataParallel` fills its buckets with whole tensors. ZeRO-1 concatenates the tensors of a bucket and splits
the elements evenly, or in proportion to shares (`shardscope.analytic.communication.chunk_sizes`). Without padding,
shards of an even split differ by at most one element per bucket. ZeRO-2 and ZeRO-3 shard as FSDP2 does: every tensor
is split along its first dimension, of size d0, into N pieces of ``ceil(d0 / N)`` rows, and the last pieces are padded
for communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import Shares, chunk_sizes

Ints = npt.NDArray[np.int64]
Shape = Sequence[int]


def replica_buckets(
    shapes: Sequence[tuple[int, ...]], bucket_mb: float, *, element_bytes: int = 4
) -> list[list[tuple[int, ...]]]:
    """Return the tensor shapes in each bucket of `DistributedDataParallel`, in the order in which buckets are sent.

    A bucket is closed only after its tensors reach `bucket_mb`, so most buckets are larger than this
    (``_compute_bucket_assignment_by_size`` in torch's reducer). In contrast, a bucket of ZeRO-1 (`bucket_elements`)
    exceeds its capacity only if a single tensor does. The single bucket that `DistributedDataParallel` uses in its
    first step is not modelled here.

    Args:
        shapes: Shapes of the trained tensors, in the order in which their gradients are ready, the last layer first.
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
    """Return the number of elements in each flat bucket of ZeRO-1.

    Buckets are filled with whole tensors in reverse order. A bucket has at most `capacity` elements, unless it consists
    of one larger tensor.
    """
    buckets: list[int] = []
    for num_elements in reversed(tensor_elements):
        if not buckets or buckets[-1] + num_elements > capacity:
            buckets.append(0)
        buckets[-1] += num_elements
    return buckets


def flat_shard_elements(
    bucket_elements: Sequence[int], world_size: int, *, is_padded: bool = False, shares: Shares = None
) -> Ints:
    """Return the number of elements that each rank updates with ZeRO-1, summed over buckets; shape `(W,)`.

    Args:
        bucket_elements: Number of elements in each flat bucket, without padding.
        world_size: W, the number of ranks.
        is_padded: Whether each bucket is padded so that all ranks get equal shards. Padding, which no rank updates, is
            at the end of the bucket and therefore in the shards of the last ranks.
        shares: Relative sizes of the shards, if buckets are not padded; None for equal shards.
    """
    total = np.zeros(world_size, dtype=np.int64)
    for num_elements in bucket_elements:
        if is_padded:
            share = math.ceil(num_elements / world_size)
            total += np.clip(num_elements - share * np.arange(world_size), 0, share)
        else:
            total += chunk_sizes(num_elements, world_size, shares)
    return total


def flat_piece_elements(
    tensor_elements: Sequence[int],
    capacity: int,
    world_size: int,
    *,
    is_padded: bool = False,
    shares: Shares = None,
) -> Ints:
    """Return the number of elements of each tensor that each rank updates with ZeRO-1; shape `(tensors, W)`.

    Args:
        tensor_elements: Number of elements in each tensor, in the module's order.
        capacity: Maximum number of elements in a bucket, as for `bucket_elements`.
        world_size: W, the number of ranks.
        is_padded: Whether buckets are padded, as for `flat_shard_elements`.
        shares: Relative sizes of the shards, as for `flat_shard_elements`.
    """
    found = np.zeros((len(tensor_elements), world_size), dtype=np.int64)
    places = reversed(range(len(tensor_elements)))
    for total in bucket_elements(tensor_elements, capacity):
        sizes = chunk_sizes(-(-total // world_size) * world_size if is_padded else total, world_size, shares)
        ends = np.cumsum(sizes)
        start = 0
        while start < total:
            place = next(places)
            end = start + tensor_elements[place]
            found[place] = np.clip(np.minimum(ends, end) - np.maximum(ends - sizes, start), 0, None)
            start = end
    return found


def padded_elements(shape: Shape, num_shards: int) -> int:
    """Return the number of elements in a tensor after FSDP2 pads its first dimension to a multiple of `num_shards`.

    A scalar is replicated on every rank, so it counts as `num_shards` elements.
    """
    if not shape:
        return num_shards
    rows = math.ceil(shape[0] / num_shards) * num_shards
    return rows * math.prod(shape[1:])


def row_shard_elements(shapes: Sequence[Shape], num_shards: int) -> Ints:
    """Return the number of elements that each rank holds when tensors are split along their first dimension.

    The result has shape `(N,)` for N = `num_shards` ranks. Scalars are replicated on every rank. Padding is not
    counted, because only FSDP2's communication buffers contain it (`padded_elements`), not gradients or optimizer
    state.
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


def row_shard_shapes(shape: Shape, num_shards: int) -> list[tuple[int, ...]]:
    """Return the shape of each rank's shard of a tensor that is split along its first dimension; see
    `row_shard_elements`.
    """
    if not shape:
        return [()] * num_shards
    return [(rows, *shape[1:]) for rows in row_shard_elements([shape[:1]], num_shards).tolist()]
