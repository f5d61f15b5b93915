"""Predicted traffic of each rank in one step: bytes and messages by collective.

Collectives have the same names as in a run's traffic records. For Shardscope's own collectives, bytes and messages
are exact. For the backend's collectives (gloo or NCCL), the total bytes of the algorithm are divided equally among
ranks; the number of messages is unknown and given as 0, as in a run's records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.hierarchical import hierarchical_all_reduce_bytes
from shardscope.analytic.communication.ring import (
    Ints,
    Shares,
    chunk_sizes,
    ring_all_gather_bytes,
    ring_all_reduce_bytes,
    ring_busy_elements,
    ring_reduce_scatter_bytes,
    ring_slices,
)
from shardscope.analytic.communication.tree import tree_all_reduce_bytes

MIB = 2**20
_PASSES = {"all_reduce": 2, "reduce_scatter": 1}
"""Total bytes that all ranks send in a backend's collective, in units of (W-1) times the payload; 1 if not listed."""
_PASSES_GLOO = {**_PASSES, "reduce_scatter": 2}
"""Values of `_PASSES` for gloo, which implements reduce-scatter with an all-reduce."""


class Sent(NamedTuple):
    """Bytes and messages that each rank sends in collectives of one name; arrays of shape `(W,)`, by rank."""

    bytes: Ints
    messages: Ints
    bounds: tuple[Ints, Ints] | None = None
    """Minimum and maximum bytes, if the exact number cannot be known in advance; None if `bytes` is exact."""
    received: Ints | None = None
    """Bytes that each rank receives; None if no rank receives more than the busiest sender sends."""
    awaited: Ints | None = None
    """Bytes that each rank's link could carry during a ring collective, including waits (`ring_busy_elements`); None
    for equal chunks, for which it does not exceed the bytes that a rank sends."""
    assumed_messages: Ints | None = None
    """Number of messages that each rank sends one after another, if `messages` is unknown; None for one to every other
    rank of the job."""

    @property
    def busiest(self) -> Ints:
        """Bytes that each rank's link could carry while it is busy (in its busier direction) or waiting."""
        most = self.bytes
        for other in (self.received, self.awaited):
            most = most if other is None else np.maximum(most, other)
        return most

    @property
    def is_uneven(self) -> bool:
        """Whether the chunks of a ring are uneven, so that ranks wait for the largest."""
        return self.awaited is not None and int(self.awaited.max()) > int(self.bytes.min())

    @property
    def unchained(self) -> Sent:
        """The same traffic without waits between the messages of a ring."""
        if self.awaited is None:
            return self
        return self._replace(awaited=np.full_like(self.bytes, self.bytes.max()))

    @property
    def counted(self) -> Ints:
        """Messages of each rank; an unknown number counts as `assumed_messages`."""
        unknown = (self.bytes > 0) & (self.messages == 0)
        return np.where(unknown, self._assumed, self.messages)

    @property
    def _assumed(self) -> Ints:
        return (
            np.full_like(self.bytes, len(self.bytes) - 1)
            if self.assumed_messages is None
            else self.assumed_messages
        )

    @property
    def is_exact(self) -> bool:
        """Whether a run sends exactly `bytes`."""
        return self.bounds is None

    def times(self, count: int) -> Sent:
        """Return the traffic of `count` repetitions of these collectives."""
        return self.each(lambda column: column * count)

    def each(self, change: Callable[[Ints], Ints]) -> Sent:
        """Return a copy with the function `change` applied to bytes, messages and bounds."""
        bounds = None if self.bounds is None else (change(self.bounds[0]), change(self.bounds[1]))
        others = (None if x is None else change(x) for x in self[3:])
        return Sent(change(self.bytes), change(self.messages), bounds, *others)

    def __add__(self, other: object) -> Sent:  # adds values, instead of concatenating tuples
        if not isinstance(other, Sent):
            return NotImplemented
        bounds = None
        if self.bounds is not None or other.bounds is not None:
            mine, its = self.bounds or (self.bytes, self.bytes), other.bounds or (other.bytes, other.bytes)
            bounds = (mine[0] + its[0], mine[1] + its[1])
        received = None
        if self.received is not None or other.received is not None:
            received = self.busiest + other.busiest
        awaited = None
        if self.awaited is not None or other.awaited is not None:
            awaited = self.busiest + other.busiest
        assumed_messages = None
        if self.assumed_messages is not None or other.assumed_messages is not None:
            assumed_messages = self._assumed + other._assumed
        return Sent(
            self.bytes + other.bytes,
            self.messages + other.messages,
            bounds,
            received,
            awaited,
            assumed_messages,
        )


Traffic = Mapping[str, Sent]
"""Traffic of each rank, by name of the collective."""


def together(parts: Iterable[Traffic]) -> dict[str, Sent]:
    """Return the sum of several parts of a step's traffic."""
    total: dict[str, Sent] = {}
    for part in parts:
        for name, sent in part.items():
            total[name] = total[name] + sent if name in total else sent
    return total


def sent_bytes(traffic: Traffic) -> Ints:
    """Return the total bytes that each rank sends in all collectives; shape `(W,)`, by rank."""
    total: Ints = sum((sent.bytes for sent in traffic.values()), np.zeros(1, dtype=np.int64))
    return total


def between(least: Traffic, expected: Traffic, most: Traffic) -> Traffic:
    """Return the expected traffic, clipped to the bytes of `least` and `most`, which also become its bounds.

    All three arguments must have the same collectives.
    """
    return {
        name: Sent(
            np.clip(expected[name].bytes, least[name].bytes, sent.bytes),
            expected[name].messages,
            (least[name].bytes, sent.bytes),
        )
        for name, sent in most.items()
    }


def one_by_one(traffic: Traffic, messages: int) -> dict[str, Sent]:
    """Return the traffic of a backend's collective in which each rank sends `messages` one after another.

    They are not counted in a run, so `Sent.messages` stays 0.
    """
    return {
        name: sent._replace(assumed_messages=np.full_like(sent.bytes, messages))
        for name, sent in traffic.items()
    }


def repeated(traffic: Traffic, groups: int) -> Traffic:
    """Return the traffic of several groups of N ranks, given the traffic of one group.

    Rank r is member r mod N of group r div N.
    """
    return {name: sent.each(lambda column: np.tile(column, groups)) for name, sent in traffic.items()}


def by_backend(op: str, num_bytes: int, world_size: int, *, backend: str = "gloo") -> Traffic:
    """Return the traffic of a collective that gloo or NCCL runs.

    Args:
        op: ``all_reduce``, ``reduce_scatter``, ``all_gather`` or ``broadcast``.
        num_bytes: Bytes of the payload: the whole tensor, that is, the output of an all-gather or the input of a
            reduce-scatter.
        world_size: W, the number of ranks.
        backend: ``gloo`` or ``nccl``.
    """
    passes = (_PASSES_GLOO if backend == "gloo" else _PASSES).get(op, 1)
    return {op: Sent(chunk_sizes(passes * (world_size - 1) * num_bytes, world_size), _none(world_size))}


def by_ring(
    op: str,
    num_elements: int,
    element_bytes: int,
    world_size: int,
    *,
    directions: int = 1,
    slice_mb: float = 4.0,
    shares: Shares = None,
) -> Traffic:
    """Return the traffic of a collective on Shardscope's ring, under the name ``ring_`` plus `op`.

    Each chunk, 1/W of the tensor without `shares`, is sent in slices of at most `slice_mb`; empty slices are not sent.

    Args:
        op: ``all_reduce``, ``reduce_scatter`` or ``all_gather``.
        num_elements: Number of elements in the whole tensor.
        element_bytes: Bytes of one element.
        world_size: W, the number of ranks.
        directions: Number of directions of an all-reduce, as for `ring_all_reduce_bytes`.
        slice_mb: Maximum size of a message in MiB.
        shares: Relative sizes of the chunks in a reduce-scatter or all-gather; None for nearly equal chunks.
    """
    if op == "all_reduce":
        num_bytes = ring_all_reduce_bytes(num_elements, element_bytes, world_size, directions=directions)
    elif op == "reduce_scatter":
        num_bytes = ring_reduce_scatter_bytes(num_elements, element_bytes, world_size, shares)
    else:
        num_bytes = ring_all_gather_bytes(num_elements, element_bytes, world_size, shares)
    if world_size == 1:
        return {f"ring_{op}": Sent(num_bytes, _none(1))}
    first = (num_elements + 1) // 2 if directions == 2 else num_elements
    sizes = chunk_sizes(first, world_size, shares)
    slices = ring_slices(sizes, element_bytes, slice_mb)
    messages = _ring_messages(op, sizes, slices, step=1)
    if directions == 2:
        rest = chunk_sizes(num_elements - first, world_size)
        messages = messages + _ring_messages(op, rest, slices, step=-1)
    awaited = None
    if shares is not None:
        awaited = np.full(world_size, ring_busy_elements([(sizes, slices)]) * element_bytes)
    return {f"ring_{op}": Sent(num_bytes, messages, awaited=awaited)}


def _ring_messages(op: str, sizes: Ints, slices: int, *, step: int) -> Ints:
    """Return the number of messages that each rank sends in one direction (`step` is 1 or -1) of the ring.

    Each chunk, with the number of elements in `sizes`, is cut into `slices` messages; empty messages are not sent.

    In a reduce-scatter, a rank sends all chunks but its own; in an all-gather, all chunks but that of the next rank.
    """
    each = np.minimum(sizes, slices)
    scattered, gathered = each.sum() - each, each.sum() - np.roll(each, -step)
    messages: Ints = {"reduce_scatter": scattered, "all_gather": gathered}.get(op, scattered + gathered)
    return messages


def by_tree(num_elements: int, element_bytes: int, world_size: int, *, slice_mb: float) -> Traffic:
    """Return the traffic of an all-reduce over Shardscope's binary tree, in slices of at most `slice_mb` MiB."""
    num_bytes = tree_all_reduce_bytes(num_elements, element_bytes, world_size)
    slices = min(num_elements, -(-num_elements * element_bytes // int(slice_mb * MIB)))
    return {"tree_all_reduce": Sent(num_bytes, tree_all_reduce_bytes(slices, 1, world_size))}


def by_hierarchy(
    num_elements: int, element_bytes: int, world_size: int, per_node: int, *, slice_mb: float
) -> Traffic:
    """Return the traffic of an all-reduce over rings inside nodes of `per_node` ranks and across nodes."""
    if per_node in (1, world_size):
        return by_ring("all_reduce", num_elements, element_bytes, world_size, slice_mb=slice_mb)
    sent = hierarchical_all_reduce_bytes(num_elements, element_bytes, world_size, per_node)
    num_nodes = world_size // per_node

    def inside(op: str) -> Ints:
        one = by_ring(op, num_elements, element_bytes, per_node, slice_mb=slice_mb)[f"ring_{op}"]
        return np.tile(one.messages, num_nodes)

    shards = chunk_sizes(num_elements, per_node).tolist()
    rings = [by_ring("all_reduce", shard, element_bytes, num_nodes, slice_mb=slice_mb) for shard in shards]
    across = np.stack([ring["ring_all_reduce"].messages for ring in rings], axis=1).reshape(-1)
    return {
        "ring_reduce_scatter": Sent(sent.reduce_scatter, inside("reduce_scatter")),
        "ring_all_reduce": Sent(sent.across, across),
        "ring_all_gather": Sent(sent.all_gather, inside("all_gather")),
    }


def packets(name: str, packet_bytes: int, world_size: int) -> Traffic:
    """Return the traffic if each rank sends one packet to every other rank; empty packets are not sent."""
    each = world_size - 1 if packet_bytes else 0
    return {name: Sent(np.full(world_size, each * packet_bytes), np.full(world_size, each))}


def _none(world_size: int) -> Ints:
    return np.zeros(world_size, dtype=np.int64)
