"""Bytes that ranks send with ZeRO's three stages, by formula (Rajbhandari et al., arXiv 1910.02054, section 7).

Stages 1 and 2 send the same bytes as a ring all-reduce, 2(W-1)/W S per rank and step: gradients are reduce-scattered,
parameters all-gathered. Stage 3 gathers parameters twice, for the forward and the backward pass, and therefore sends
1.5 times as much. FSDP2 adds padding (`shardscope.analytic.sharding.padded_elements`), which these formulas include.
Compressed gradients are reduce-scattered as packets, one for each rank's share; parameters are gathered uncompressed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardscope.analytic.communication.traffic import (
    Traffic,
    by_backend,
    by_ring,
    packets,
    repeated,
    together,
)
from shardscope.analytic.sharding import Shape, padded_elements
from shardscope.spec.compression import Collective

_DIGEST_BYTES = 8


class ShareableCompression(Protocol):
    """A compression method that works element by element, so that each share of a bucket can be packed separately."""

    def share_collective(self, share: int, world_size: int) -> Collective:
        """Return the collective that gives each rank its share of the mean of one bucket."""


@dataclass(frozen=True)
class ShardCollectives:
    """Settings for the reduce-scatters and all-gathers of shards.

    Attributes:
        element_bytes: Bytes of one element.
        compression: Compression of the gradients; None for uncompressed gradients.
        backend: ``gloo`` or ``nccl`` for the backend's collectives; None for Shardscope's ring.
    """

    element_bytes: int
    compression: ShareableCompression | None = None
    backend: str | None = None

    def carried(self, op: str, num_elements: int, world_size: int, element_bytes: int = 0) -> Traffic:
        """Traffic of one collective on a whole tensor of `num_elements`."""
        width = element_bytes or self.element_bytes
        if self.backend is None:
            return by_ring(op, num_elements, width, world_size)
        return by_backend(op, num_elements * width, world_size, backend=self.backend)

    def reduced(self, num_elements: int, world_size: int) -> Traffic:
        """Traffic for reduce-scattering gradients, in equal shares if they are compressed."""
        if self.compression is None:
            return self.carried("reduce_scatter", num_elements, world_size)
        op, count, width = self.compression.share_collective(num_elements // world_size, world_size)
        if op == "sum":
            return self.carried("reduce_scatter", count, world_size, width)
        return packets("packet_all_to_all", count * width, world_size)

    def gathered(self, num_elements: int, world_size: int) -> Traffic:
        """Traffic for all-gathering parameters."""
        return self.carried("all_gather", num_elements, world_size)


def zero_1_traffic(bucket_elements: Sequence[int], world_size: int, collectives: ShardCollectives) -> Traffic:
    """Traffic of one step with ZeRO-1, which does not depend on the number of micro-batches.

    Buckets are padded to equal shares if gradients are compressed or the backend runs the collectives.

    Args:
        bucket_elements: Elements of each flat bucket.
        world_size: W, the number of ranks.
        collectives: Settings of the collectives.
    """
    is_even = collectives.compression is not None or collectives.backend is not None
    padding = world_size if is_even else 1
    sizes = [-(-count // padding) * padding for count in bucket_elements]
    return together(
        part
        for size in sizes
        for part in (collectives.reduced(size, world_size), collectives.gathered(size, world_size))
    )


def agreement_traffic(meetings: int, world_size: int) -> Traffic:
    """Traffic of the digests with which ranks check, for ZeRO-2 and ZeRO-3, that all have run the same layers.

    Args:
        meetings: Number of checks in a step: one at its end, one before each collective of the backend, and with
            replicas one before each unit's all-reduce across them.
        world_size: W, the number of ranks.
    """
    sent = packets("agreement", _DIGEST_BYTES, world_size)["agreement"]
    return {"agreement": sent.times(meetings)}


def fully_sharded_traffic(
    units: Sequence[Sequence[Shape]],
    world_size: int,
    collectives: ShardCollectives,
    *,
    gathers: int,
    replicas: int = 1,
    micro_batches: int = 1,
    reduced: Sequence[Sequence[Shape]] | None = None,
    idle: Collection[int] = (),
) -> Traffic:
    """Traffic of one step with ZeRO-2 or ZeRO-3 in FSDP2, including padding and agreement checks.

    With N = W / replicas, P the padded elements and m micro-batches, a rank sends (N-1)/N P for each collective of its
    shard group: m reduce-scatters, and the all-gathers. With replicas, the backend all-reduces the gradient shards
    across them after the last micro-batch, and compression applies only inside a group.

    Args:
        units: Shapes of the parameters of each FSDP unit.
        world_size: W, the number of ranks.
        collectives: Settings of the collectives.
        gathers: Number of all-gathers of each unit in a step: 1 in stage 2, 2m in stage 3.
        replicas: Number of groups, each of which holds the whole model in shards (HSDP); divides `world_size`.
        micro_batches: m, the forward and backward passes of a step.
        reduced: For each unit, the shapes that get gradients; None for all of them.
        idle: Indices of the units that no forward pass reaches; they are prefetched nevertheless.
    """
    num_shards = world_size // replicas
    taught = units if reduced is None else reduced
    often = [max(1, gathers - micro_batches) if place in idle else gathers for place in range(len(units))]
    num_taught = sum(bool(shapes) for shapes in taught)
    meetings = 1 + (num_taught if replicas > 1 else 0)
    if collectives.backend is not None:
        meetings += sum(often) + num_taught * micro_batches

    def parts() -> Iterator[Traffic]:
        yield agreement_traffic(meetings, world_size)
        for shapes, with_gradients, count in zip(units, taught, often, strict=True):
            elements, summed = (
                sum(padded_elements(shape, num_shards) for shape in part) for part in (shapes, with_gradients)
            )
            yield unit_traffic(
                collectives.gathered(elements, num_shards), collectives.reduced(summed, num_shards) if summed else {},
                gathers=count, reductions=micro_batches, num_shards=num_shards, replicas=replicas,
                shard_bytes=summed // num_shards * collectives.element_bytes,
            )  # fmt: skip

    return together(parts())


def unit_traffic(
    gathered: Traffic,
    reduced: Traffic,
    *,
    gathers: int,
    reductions: int,
    num_shards: int,
    replicas: int = 1,
    shard_bytes: int = 0,
) -> Traffic:
    """Traffic of one FSDP unit in a step.

    Args:
        gathered: Traffic of one all-gather of its parameters, in one group of ranks.
        reduced: Traffic of one reduce-scatter of its gradients; empty if it has none.
        gathers: All-gathers in a step.
        reductions: Reduce-scatters in a step.
        num_shards: N, the number of ranks in a group, which together hold one copy of the model.
        replicas: Number of groups (HSDP).
        shard_bytes: Bytes of one rank's shard of the gradients, which replicas all-reduce once.
    """
    whole = repeated(together([times(gathered, gathers), times(reduced, reductions)]), replicas)
    if replicas == 1 or not shard_bytes:
        return whole
    return together([whole, _across(shard_bytes, num_shards, replicas)])


def times(traffic: Traffic, count: int) -> Traffic:
    """Return the traffic multiplied by `count`."""
    return {name: sent.times(count) for name, sent in traffic.items()}


def _across(num_bytes: int, num_shards: int, replicas: int) -> Traffic:
    """Traffic of the backend's all-reduce of each rank's shard across the replicas."""
    sent = by_backend("all_reduce", num_bytes, replicas)["all_reduce"]
    return {"all_reduce": sent.each(lambda column: np.repeat(column, num_shards))}
