"""Bytes that ranks send with the three stages of ZeRO, by formula (Rajbhandari et al., arXiv 1910.02054, section 7).

In stages 1 and 2, gradients are reduce-scattered and parameters all-gathered. For S bytes of parameters, each of W
ranks sends 2(W-1)/W S in a step, as in a ring all-reduce. In stage 3, parameters are gathered twice, for the forward
and for the backward pass, so a rank sends 1.5 times as much. The formulas include the padding of FSDP2
(`shardscope.analytic.sharding.padded_elements`). Compressed gradients are sent as packets, one for each rank's share;
parameters are never compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardscope.analytic.communication.ring import Shares, chunk_sizes, ring_busy_elements, ring_slices
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
        """Return the collective that gives each rank its share, of `share` elements, of a bucket's mean gradient."""


@dataclass(frozen=True)
class ShardCollectives:
    """Settings for the reduce-scatters and all-gathers of shards.

    Attributes:
        element_bytes: Bytes of one element.
        compression: Compression of the gradients; None for uncompressed gradients.
        backend: ``gloo`` or ``nccl`` for the backend's collectives; None for Shardscope's ring.
        shares: Relative sizes of the ranks' shards, on the ring; None for equal shards.
    """

    element_bytes: int
    compression: ShareableCompression | None = None
    backend: str | None = None
    shares: Shares = None

    def carried(self, op: str, num_elements: int, world_size: int, element_bytes: int = 0) -> Traffic:
        """Return the traffic of one collective on a whole tensor of `num_elements` elements."""
        width = element_bytes or self.element_bytes
        if self.backend is None:
            return by_ring(op, num_elements, width, world_size, shares=self.shares)
        return by_backend(op, num_elements * width, world_size, backend=self.backend)

    def reduced(self, num_elements: int, world_size: int) -> Traffic:
        """Return the traffic for reduce-scattering gradients; if these are compressed, ranks must have equal shares."""
        if self.compression is None:
            return self.carried("reduce_scatter", num_elements, world_size)
        op, count, width = self.compression.share_collective(num_elements // world_size, world_size)
        if op == "sum":
            return self.carried("reduce_scatter", count, world_size, width)
        return packets("packet_all_to_all", count * width, world_size)

    def gathered(self, num_elements: int, world_size: int) -> Traffic:
        """Return the traffic for all-gathering parameters."""
        return self.carried("all_gather", num_elements, world_size)


def flat_shards_traffic(
    bucket_elements: Sequence[int],
    world_size: int,
    collectives: ShardCollectives,
    *,
    reductions: int = 1,
) -> Traffic:
    """Return the traffic of one step with ZeRO-1, or with ZeRO-2 in flat buckets.

    Collectives of one kind run one after another. If gradients are compressed or the backend runs the collectives,
    buckets are padded so that ranks have equal shares.

    Args:
        bucket_elements: Number of elements in each flat bucket.
        world_size: W, the number of ranks.
        collectives: Settings of the collectives.
        reductions: Number of micro-batches in a step whose gradients are reduced: 1 in stage 1, all in stage 2.
    """
    sizes = padded_buckets(bucket_elements, world_size, collectives)
    found = together(
        part
        for size in sizes
        for part in (
            times(collectives.reduced(size, world_size), reductions),
            collectives.gathered(size, world_size),
        )
    )
    if collectives.shares is None:
        return found
    width = collectives.element_bytes
    chunks = [chunk_sizes(size, world_size, collectives.shares) for size in sizes]
    awaited = np.full(
        world_size, width * ring_busy_elements((each, ring_slices(each, width)) for each in chunks)
    )
    again = {"ring_reduce_scatter": reductions, "ring_all_gather": 1}
    return {name: sent._replace(awaited=awaited * again.get(name, 1)) for name, sent in found.items()}


def padded_buckets(
    bucket_elements: Sequence[int], world_size: int, collectives: ShardCollectives
) -> list[int]:
    """Return the number of elements in each bucket with its padding; for the arguments, see `flat_shards_traffic`."""
    is_even = collectives.compression is not None or collectives.backend is not None
    padding = world_size if is_even else 1
    return [-(-count // padding) * padding for count in bucket_elements]


def agreement_traffic(num_checks: int, world_size: int) -> Traffic:
    """Return the traffic of the digests that ranks exchange to check that all have run the same layers.

    With ZeRO-2 and ZeRO-3, a rank that ran different layers could otherwise receive a message meant for another layer.

    Args:
        num_checks: Number of checks in a step: one at its end, one before each backend collective, and, with
            replicas, one before each FSDP unit's all-reduce across replicas.
        world_size: W, the number of ranks.
    """
    sent = packets("agreement", _DIGEST_BYTES, world_size)["agreement"]
    return {"agreement": sent.times(num_checks)}


def fully_sharded_traffic(
    units: Sequence[Sequence[Shape]],
    world_size: int,
    collectives: ShardCollectives,
    *,
    gathers: int | Sequence[int],
    replicas: int = 1,
    micro_batches: int = 1,
    reduced: Sequence[Sequence[Shape]] | None = None,
) -> Traffic:
    """Return the traffic of one step with ZeRO-2 or ZeRO-3, implemented by FSDP2, including the checks between ranks.

    A shard group has N = W / replicas ranks. For a unit of P elements, including padding, a rank sends (N-1)/N P
    elements in each of m reduce-scatters and in each all-gather. With several replicas, the backend all-reduces the
    gradient shards across replicas after the last micro-batch; compression applies only inside a shard group.

    Args:
        units: Shapes of the parameters in each FSDP unit.
        world_size: W, the number of ranks.
        collectives: Settings of the collectives.
        gathers: Number of all-gathers in a step, of every unit or by unit: 1 in stage 2, 2m in stage 3.
        replicas: Number of shard groups, each of which holds the whole model (HSDP); must divide `world_size`.
        micro_batches: m, the number of micro-batches in a step.
        reduced: For each unit, the shapes of the parameters that get gradients; None if all parameters do.
    """
    num_shards = world_size // replicas
    taught = units if reduced is None else reduced
    often = [gathers] * len(units) if isinstance(gathers, int) else gathers
    num_taught = sum(bool(shapes) for shapes in taught)
    num_checks = checks_of_units(collectives, num_taught, sum(often), micro_batches, replicas=replicas)

    def parts() -> Iterator[Traffic]:
        yield agreement_traffic(num_checks, world_size)
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


def checks_of_units(
    collectives: ShardCollectives, num_taught: int, num_gathers: int, micro_batches: int, *, replicas: int
) -> int:
    """Return how often ranks check in a step that they run the same layers.

    They do so at its end, before each of the backend's collectives, and before each sum across replicas of what our own
    ring has scattered.

    Args:
        collectives: Settings of the collectives.
        num_taught: Number of units with gradients.
        num_gathers: Number of all-gathers in a step.
        micro_batches: Number of micro-batches in a step.
        replicas: Number of shard groups.
    """
    if collectives.backend is not None:
        return 1 + num_gathers + num_taught * micro_batches
    return 1 + (num_taught if replicas > 1 else 0)


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
    """Return the traffic of one FSDP unit in a step.

    Args:
        gathered: Traffic of one all-gather of the unit's parameters, in one shard group.
        reduced: Traffic of one reduce-scatter of the unit's gradients, in one shard group; empty without gradients.
        gathers: Number of all-gathers in a step.
        reductions: Number of reduce-scatters in a step.
        num_shards: N, the number of ranks in a shard group, which together hold one copy of the model.
        replicas: Number of shard groups (HSDP).
        shard_bytes: Bytes of one rank's shard of the gradients, which is all-reduced once across replicas.
    """
    whole = repeated(together([times(gathered, gathers), times(reduced, reductions)]), replicas)
    if replicas == 1 or not shard_bytes:
        return whole
    return together([whole, across_replicas(shard_bytes, num_shards, replicas)])


def times(traffic: Traffic, count: int) -> Traffic:
    """Return the traffic of `count` repetitions."""
    return {name: sent.times(count) for name, sent in traffic.items()}


def across_replicas(num_bytes: int, num_shards: int, replicas: int) -> Traffic:
    """Return the traffic of the backend's all-reduce of each rank's shard across replicas."""
    sent = by_backend("all_reduce", num_bytes, replicas)["all_reduce"]
    return {"all_reduce": sent.each(lambda column: np.repeat(column, num_shards))}
