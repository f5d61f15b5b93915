"""Bytes on the wire of ZeRO's three stages, by formula (Rajbhandari et al., arXiv 1910.02054, section 7).

Stages 1 and 2 move what the ring does, 2(W-1)/W S a rank and step: gradients reduce-scattered, parameters gathered.
Stage 3 gathers parameters twice, for the forward and for the backward pass, and so moves 1.5 times as much. FSDP2 adds
padding (`shardscope.analytic.sharding.padded_elements`), which these forms count. Compressed gradients are
reduce-scattered as packets, one for each rank's share; parameters are gathered as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import ring_all_reduce_bytes
from shardscope.analytic.sharding import Shape, padded_elements

Ints = npt.NDArray[np.int64]
_DIGEST_BYTES = 8


class Shares(Protocol):
    """A method of compression whose packets are of single numbers, so that a share of a bucket can be one."""

    @property
    def is_on(self) -> bool:
        """Whether anything is compressed."""

    def share_bytes(self, share: int, world_size: int) -> Ints:
        """Bytes each rank sends to reduce-scatter one bucket, `share` elements per rank; shape `(W,)`, by rank."""


def zero_1_bytes(
    bucket_elements: Sequence[int], element_bytes: int, world_size: int, *, compression: Shares | None = None
) -> Ints:
    """Bytes that each rank sends in a step of ZeRO-1, however many micro-batches it has; shape `(W,)`, by rank.

    Args:
        bucket_elements: Elements of each flat bucket.
        element_bytes: Bytes of one element.
        world_size: Ranks.
        compression: Of the gradients, None for none; buckets are then padded to equal shares.
    """
    total = np.zeros(world_size, dtype=np.int64)
    for num_elements in bucket_elements:
        if compression is not None and compression.is_on:
            share = -(-num_elements // world_size)
            total += compression.share_bytes(share, world_size) + (world_size - 1) * share * element_bytes
            continue
        total += ring_all_reduce_bytes(num_elements, element_bytes, world_size)
    return total


def agreement_bytes(num_units: int, world_size: int, *, replicas: int = 1) -> int:
    """Bytes that each rank sends in a step of ZeRO-2 or ZeRO-3 with the ring to prove that all took the same layers.

    Each rank sends a digest to each other one at the step's end and, with replicas, before each unit crosses them.

    Args:
        num_units: Modules that communicate by themselves.
        world_size: Ranks.
        replicas: As in `fully_sharded_bytes`, which these bytes add to.
    """
    meetings = 1 + (num_units if replicas > 1 else 0)
    return meetings * (world_size - 1) * _DIGEST_BYTES


def fully_sharded_bytes(
    units: Sequence[Sequence[Shape]],
    element_bytes: int,
    world_size: int,
    *,
    stage: Literal[2, 3],
    replicas: int = 1,
    micro_batches: int = 1,
    compression: Shares | None = None,
) -> Ints:
    """Bytes that each rank sends in a step of ZeRO-2 or ZeRO-3 under FSDP2, padding included; shape `(W,)`, by rank.

    With N = W / replicas, P the padded elements and m micro-batches, a rank sends (N-1)/N P for each collective of its
    shard group: m reduce-scatters and, in stage 2, one all-gather, in stage 3, 2m. With replicas, the shards of the
    gradients are all-reduced across them after the last micro-batch; the backend does that, and a rank is counted its
    even share of 2(R-1) P/N, the remainder on the lowest.

    Args:
        units: For each module that communicates by itself, the shapes of its trained parameters.
        element_bytes: Bytes of one element.
        world_size: Ranks.
        stage: 2 or 3.
        replicas: Groups that each hold the whole model in shards (HSDP); divides `world_size`.
        micro_batches: Forward and backward passes a step.
        compression: Of the gradients, None for none, inside each shard group; what crosses between replicas is not
            compressed.
    """
    num_shards = world_size // replicas
    gathers = 1 if stage == 2 else 2 * micro_batches
    replica = np.arange(world_size) // num_shards
    total = np.zeros(world_size, dtype=np.int64)
    for shapes in units:
        share = sum(padded_elements(shape, num_shards) for shape in shapes) // num_shards
        chunk = share * element_bytes
        exchanged = 2 * (replicas - 1) * chunk
        scattered = (num_shards - 1) * chunk
        if compression is not None and compression.is_on:
            scattered = int(compression.share_bytes(share, num_shards)[0])
        total += micro_batches * scattered + gathers * (num_shards - 1) * chunk
        total += exchanged // replicas + (replica < exchanged % replicas)
    return total
