"""Bytes of work buffers on each rank: receive buffers, buffered updates, and the state of compression.

Rings, trees and gossip receive messages into buffers that stay allocated. A buffer has twice the size of the longest
message so far, because receives are posted in advance. Layer-wise optimizers on a CPU buffer updates until norms are
known: all updates of a rank if norms are summed over ranks, else one batch of tensors that fits in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shardscope.analytic.communication.compressed import FLOAT_BYTES
from shardscope.analytic.communication.ring import Shares, chunk_sizes
from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory.held import (
    MIB,
    RECEIVED_AHEAD,
    Ints,
    Sharding,
    Sums,
    largest_batch,
    ring_buffer_bytes,
    slice_bytes,
    updated_elements,
)
from shardscope.analytic.sharding import padded_elements
from shardscope.spec.compression import Shapes
from shardscope.spec.model.step import ParameterRow


def hierarchy_buffer_bytes(sums: Sums, world_size: int, per_node: int, *, slice_mb: float) -> Ints:
    """Return the bytes of each rank's receive buffers for a hierarchical all-reduce; shape `(W,)`, by rank.

    Args:
        sums: Sizes of the reduced tensors.
        world_size: W, the number of ranks.
        per_node: Number of ranks per node.
        slice_mb: Maximum size of a message in MiB.
    """
    if per_node in (1, world_size):
        return np.full(world_size, ring_buffer_bytes(sums, world_size, slice_mb=slice_mb))
    inside = ring_buffer_bytes(sums, per_node, slice_mb=slice_mb)
    across = np.array(
        [
            ring_buffer_bytes(
                [(int(chunk_sizes(size, per_node)[place]), width) for size, width in sums],
                world_size // per_node,
                slice_mb=slice_mb,
            )
            for place in range(per_node)
        ]
    )
    return np.tile(inside + across, world_size // per_node)


def tree_buffer_bytes(sums: Sums, world_size: int, *, slice_mb: float) -> Ints:
    """Return the bytes of each rank's receive buffers for messages from its children in a tree; shape `(W,)`."""
    longest, ranks = int(slice_mb * MIB), np.arange(world_size)
    slices = [
        slice_bytes(size, width, min(size, -(-size * width // longest))) for size, width in sums if size
    ]
    children = (2 * ranks + 1 < world_size).astype(np.int64) + (2 * ranks + 2 < world_size)
    return np.asarray(children * RECEIVED_AHEAD * max(slices, default=0))


def compression_state_bytes(
    step: JobStep, buckets: Iterable[Shapes], *, among: int = 0, scatters: bool = False
) -> int | None:
    """Return the bytes of compression state on each rank, such as residuals; None if the method has no formula for it.

    Args:
        step: A step of a job.
        buckets: Shapes of the tensors in each bucket.
        among: Number of ranks that exchange a bucket; 0 for all.
        scatters: Whether each rank obtains only its own shard of the mean, as for `Compression.kept_bytes`.
    """
    if not step.is_compressed:
        return 0
    ranks, method = among or step.world_size, step.job.compression
    found = [method.kept_bytes(shapes, ranks, scatters=scatters) for shapes in buckets]
    return None if None in found else sum(filter(None, found))


def gossip_buffer_bytes(step: JobStep, *, slice_mb: float, has_mixed: bool) -> int:
    """Return the bytes of a rank's work buffers with gossip averaging.

    They contain a flat copy of the trained parameters and, after the first averaging step (`has_mixed`), receive
    buffers for slices from the neighbours. With compression, there are no slices, but float32 copies of the parameters
    that the rank and its neighbours have published.
    """
    if step.job.compression.is_on:
        return step.num_elements * (step.element_bytes + FLOAT_BYTES * min(3, step.world_size))
    size, longest = step.num_elements, max(1, int(slice_mb * MIB) // step.element_bytes)
    ahead = min(RECEIVED_AHEAD, -(-size // longest)) * min(2, step.world_size - 1)
    return step.element_bytes * (size + has_mixed * ahead * min(size, longest))


def unit_elements(step: JobStep, ranks: int, *, trained: bool) -> list[int]:
    """Return the number of elements, padding included, in each FSDP2 unit: of all parameters, or only of trained ones.

    These are the sizes of FSDP2's flat buffers for all-gathers and, if `trained`, for reduce-scatters. Units without
    such parameters are left out.
    """
    units = [0] * len(step.trace.units)
    for row in step.rows:
        if not row.is_whole and (row.is_trained or not trained):
            units[row.unit] += padded_elements(row.shape, ranks)
    return [size for size in units if size]


def updates_of_whole(step: JobStep) -> int:
    """Return the bytes of the update buffer of a rank that updates all tensors of its model, or of its part of it.

    Norms of layers that are sums over ranks are known only after all updates.
    """
    return int(updates_of_shards(step, 0, ranks=1)[0]) if step.sums_layers else updates_of(step.rows, step)


def updates_of(rows: Sequence[ParameterRow], step: JobStep) -> int:
    """Return the bytes of the update buffer for whole tensors, which are updated one batch at a time."""
    return step.element_bytes * max((largest_batch(sizes) for sizes in _waiting(rows, step)), default=0)


def updates_of_shards(
    step: JobStep,
    stage: int,
    *,
    ranks: int | None = None,
    bucket_mb: float = 1.0,
    is_padded: bool = False,
    shares: Shares = None,
) -> Ints:
    """Return the bytes of the update buffer for each rank's shards; shape `(N,)`, by rank.

    All updates of a rank are buffered until the norms of whole tensors are known. The arguments are the same
    as for `spread_states`.
    """
    cut = Sharding(stage, ranks or step.world_size, 0, bucket_mb, step.element_bytes, is_padded, shares)
    rows = [row for row in step.rows if row.is_trained]
    places = [
        place for group in step.job.optimizer.buffered([len(row.shape) for row in rows]) for place in group
    ]
    return step.element_bytes * updated_elements(rows, cut, only=frozenset(places))


def _waiting(rows: Sequence[ParameterRow], step: JobStep) -> list[list[int]]:
    """Return the sizes, in elements, of the tensors whose updates are buffered, by group of `Optimizer.buffered`."""
    trained = [row for row in rows if row.is_trained]
    groups = step.job.optimizer.buffered([len(row.shape) for row in trained])
    return [[trained[place].num_elements for place in group] for group in groups]
