"""Rings: the bytes that each rank sends, the link available to a group of ranks, and the time of a ring over it.

All functions accept arrays, for millions of groups at once. Rank numbers vary fastest along the tensor-parallel axis,
then context, data and pipeline, so that the heaviest traffic stays on the fastest links. A group is `group_size` ranks,
`stride` apart.

Example:
    >>> strides = group_strides(tensor=8, context=1, data=16)
    >>> bandwidth, latency = spanning_link(cluster, group_size=16, stride=strides.data)  # doctest: +SKIP
    >>> ring_time("all_reduce", 1e9, 16, bandwidth, latency)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.errors import unknown_name
from shardscope.spec.cluster import Cluster

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
RING_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
"""How many times each byte travels around the ring, not counting a rank's own share."""


def even_share_bytes(num_bytes: npt.ArrayLike, workers: npt.ArrayLike) -> Floats:
    """Bytes that each of W ranks sends in a reduce-scatter or all-gather with equal chunks: (W-1)/W S.

    Arguments follow NumPy broadcasting.
    """
    size, count = np.asarray(num_bytes, dtype=np.float64), np.asarray(workers, dtype=np.float64)
    share: Floats = size * ((count - 1) / count)
    return share


def chunk_sizes(num_elements: int, world_size: int) -> Ints:
    """Elements in each of `world_size` nearly equal chunks; the first chunks take the remainder; shape `(W,)`."""
    base, rest = divmod(num_elements, world_size)
    return base + (np.arange(world_size) < rest).astype(np.int64)


def ring_reduce_scatter_bytes(num_elements: int, element_bytes: int, world_size: int) -> Ints:
    """Bytes that each rank sends in a ring reduce-scatter: all chunks except its own; shape `(W,)`, by rank."""
    return (num_elements - chunk_sizes(num_elements, world_size)) * element_bytes


def ring_all_gather_bytes(num_elements: int, element_bytes: int, world_size: int) -> Ints:
    """Bytes that each rank sends in a ring all-gather: all chunks except its successor's; shape `(W,)`, by rank."""
    return (num_elements - np.roll(chunk_sizes(num_elements, world_size), -1)) * element_bytes


def ring_all_reduce_bytes(
    num_elements: int, element_bytes: int, world_size: int, *, directions: int = 1
) -> Ints:
    """Bytes that each rank sends in a ring all-reduce; shape `(W,)`, by rank. The sum is 2(W-1) S, exactly.

    Args:
        num_elements: Elements of the tensor.
        element_bytes: Bytes of one element.
        world_size: Ranks in the ring.
        directions: 2 sends the first half (rounded up) clockwise and the rest the other way around.
    """
    if world_size == 1:
        return np.zeros(1, dtype=np.int64)
    if directions == 1:
        scatter = ring_reduce_scatter_bytes(num_elements, element_bytes, world_size)
        return scatter + ring_all_gather_bytes(num_elements, element_bytes, world_size)
    first = (num_elements + 1) // 2
    clockwise = ring_all_reduce_bytes(first, element_bytes, world_size)
    rest = chunk_sizes(num_elements - first, world_size)
    # in the other direction, a rank gathers all chunks except its predecessor's
    counter = 2 * rest.sum() - rest - np.roll(rest, 1)
    sent: Ints = clockwise + counter * element_bytes
    return sent


class Strides(NamedTuple):
    """Distance, in ranks, between neighbours of a group along each axis."""

    tensor: Ints
    context: Ints
    data: Ints
    pipeline: Ints


class Spanned(NamedTuple):
    """Link of one rank in its group's ring, as arrays over the given groups."""

    bandwidth: Floats
    """Bytes per second, one way."""
    latency: Floats
    """Seconds per message."""


def group_strides(*, tensor: npt.ArrayLike, context: npt.ArrayLike, data: npt.ArrayLike) -> Strides:
    """Return the strides of a layout's groups; the degrees follow NumPy broadcasting.

    Expert groups and ZeRO's shard groups are taken from data x context and so have the stride of `context`.
    """
    tensor, context, data = (np.asarray(degree, dtype=np.int64) for degree in (tensor, context, data))
    one = np.ones_like(tensor)
    return Strides(one, tensor, tensor * context, tensor * context * data)


def members_per_node(cluster: Cluster, group_size: npt.ArrayLike, stride: npt.ArrayLike) -> Floats:
    """Ranks of a group that share a node: per_node / stride, at least 1 and at most the group's size."""
    group, step = np.asarray(group_size, dtype=np.float64), np.asarray(stride, dtype=np.float64)
    members: Floats = np.minimum(np.maximum(np.floor(cluster.per_node / step), 1.0), group)
    return members


def is_inside_node(
    cluster: Cluster, group_size: npt.ArrayLike, stride: npt.ArrayLike
) -> npt.NDArray[np.bool_]:
    """Whether every group of this shape lies within one node."""
    group, step = np.asarray(group_size, dtype=np.float64), np.asarray(stride, dtype=np.float64)
    groups = cluster.per_node / (group * step)  # float division takes a tenth of the time of integer division
    inside: npt.NDArray[np.bool_] = (group == 1) | (groups == np.floor(groups))
    return inside if cluster.nodes > 1 else np.ones_like(inside)


def spanning_link(cluster: Cluster, group_size: npt.ArrayLike, stride: npt.ArrayLike) -> Spanned:
    """Return the bandwidth and latency of one rank in its group's ring; arguments follow NumPy broadcasting.

    Inside a node this is the node's link. Across nodes, a group with r members per node uses r devices' shares of the
    network, as NCCL builds one ring per network card. The bandwidth is limited by that inside the node, min(B_intra, r
    B_inter), and every step takes the longer of the two latencies.
    """
    inside = is_inside_node(cluster, group_size, stride)
    rails = members_per_node(cluster, group_size, stride)
    across = np.minimum(cluster.intra.bandwidth, rails * cluster.inter.bandwidth)
    bandwidth: Floats = np.where(inside, cluster.intra.bandwidth, across)
    slower = max(cluster.intra.latency_s, cluster.inter.latency_s)
    latency: Floats = np.where(inside, cluster.intra.latency_s, slower)
    return Spanned(bandwidth, latency)


def ring_time(
    op: str,
    num_bytes: npt.ArrayLike,
    group_size: npt.ArrayLike,
    bandwidth: npt.ArrayLike,
    latency: npt.ArrayLike,
) -> Floats:
    """Time of a ring collective (pairwise for all-to-all) over W ranks, in seconds; follows NumPy broadcasting.

    The time is k ((W-1) α + (W-1)/W S/B), with k = 2 for an all-reduce, else 1 (Thakur et al. 2005). ``"send_recv"`` is
    one message, α + S/B, or 0 if W = 1.

    Args:
        op: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"all_to_all"`` or ``"send_recv"``.
        num_bytes: S, bytes of the whole tensor, that is, after gathering or before scattering.
        group_size: W, the number of ranks in the group.
        bandwidth: B, bytes per second that one rank sends while it receives at the same rate.
        latency: α, seconds per message.
    """
    count = np.asarray(group_size, dtype=np.float64)
    size, rate, delay = (np.asarray(value, dtype=np.float64) for value in (num_bytes, bandwidth, latency))
    if op == "send_recv":
        return np.where(count > 1, delay + size / rate, 0.0)
    if op not in RING_PASSES:
        raise unknown_name("op", op, [*RING_PASSES, "send_recv"])
    seconds: Floats = RING_PASSES[op] * ((count - 1) * delay + even_share_bytes(size, count) / rate)
    return seconds
