"""Ring collectives: the bytes that each rank sends, the link that a group of ranks uses, and the time of a collective.

Functions for groups accept arrays, for millions of groups in one call. A group consists of `group_size` ranks whose
numbers are `stride` apart. Ranks are numbered along the tensor-parallel axis first, then along context, data and
pipeline, so that the groups with the heaviest traffic use the fastest links.

Example:
    >>> strides = group_strides(tensor=8, context=1, data=16)
    >>> bandwidth, latency = spanning_link(cluster, group_size=16, stride=strides.data)  # doctest: +SKIP
    >>> ring_time("all_reduce", 1e9, 16, bandwidth, latency)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.errors import unknown_name
from shardscope.spec.cluster import Cluster
from shardscope.spec.compression import Compression
from shardscope.spec.shares import shard_sizes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Shares = Sequence[int] | None
"""Relative sizes of the chunks of a ring's ranks; None for nearly equal chunks."""
RING_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
"""Number of passes around the ring; in each pass, every rank sends (W-1)/W of the tensor."""


def even_share_bytes(num_bytes: npt.ArrayLike, workers: npt.ArrayLike) -> Floats:
    """Return the bytes that each of W ranks sends in a reduce-scatter or all-gather with equal chunks: (W-1)/W S.

    Args:
        num_bytes: S, bytes of the whole tensor; a number or an array.
        workers: W, the number of ranks; a number or an array.
    """
    size, count = np.asarray(num_bytes, dtype=np.float64), np.asarray(workers, dtype=np.float64)
    share: Floats = size * ((count - 1) / count)
    return share


def chunk_sizes(num_elements: int, world_size: int, shares: Shares = None) -> Ints:
    """Return the sizes of W = `world_size` chunks; shape `(W,)`.

    Without `shares`, they are nearly equal: if `num_elements` is not a multiple of W, the first chunks have one element
    more than the others.

    Args:
        num_elements: Number of elements in the tensor.
        world_size: W, the number of ranks.
        shares: Relative sizes of the chunks; None for nearly equal chunks.
    """
    if shares is not None:
        return np.array(shard_sizes(num_elements, shares), dtype=np.int64)
    base, rest = divmod(num_elements, world_size)
    return base + (np.arange(world_size) < rest).astype(np.int64)


def ring_slices(sizes: Ints, element_bytes: int, slice_mb: float = 4.0) -> int:
    """Return the number of slices into which a ring cuts each of its chunks.

    Args:
        sizes: Sizes of the chunks, in elements.
        element_bytes: Bytes of one element.
        slice_mb: Maximum size of a slice of the largest chunk, in MiB.
    """
    return max(1, -(-int(sizes.max()) * element_bytes // int(slice_mb * 2**20)))


def ring_busy_elements(calls: Iterable[tuple[Ints, int]]) -> int:
    """Return the duration of ring reduce-scatters or all-gathers, in elements that a link could carry in this time.

    On equal links, a slice is sent once it has arrived at the link and the previous slice has left. A rank starts a
    call when it has sent and received all messages of the previous call. It does not wait for the next rank, which has
    received all of these messages by then. Gloo sends a message only when its receive has been posted, but counts it as
    sent once the system's buffers hold it, so its own messages do not keep the next rank from posting the receives of
    the call. All ranks are assumed to start the first call together, although in training, a rank that finishes early
    begins the next step early; the result is therefore an upper bound. With equal chunks, it is the number of elements
    that a rank sends.

    Args:
        calls: For each of several consecutive calls, the sizes of the W chunks in ring order, and the number of slices
            of each chunk.

    Example:
        >>> [ring_busy_elements([(np.array([60, 60, 12, 12]), slices)]) for slices in (1, 2, 60)]
        [180, 150, 132]
    """
    began: Ints | None = None
    for sizes, slices in calls:
        ranks = np.arange(len(sizes))
        free = np.zeros(len(sizes), np.int64) if began is None else began
        ends: list[Ints] = []
        for message in range((len(sizes) - 1) * slices):
            hop, part = divmod(message, slices)
            chunk = sizes[(ranks - 1 - hop) % len(sizes)]
            if hop:
                free = np.maximum(free, np.roll(ends[message - slices], 1))
            free = free + chunk // slices + (part < chunk % slices)
            ends.append(free)
        began = np.maximum(free, np.roll(free, 1))
    return 0 if began is None else int(began.max())


def ring_reduce_scatter_bytes(
    num_elements: int, element_bytes: int, world_size: int, shares: Shares = None
) -> Ints:
    """Return the bytes that each rank sends in a ring reduce-scatter; shape `(W,)`, by rank.

    A rank sends all chunks except its own, so the sum over ranks is (W-1) S whatever the sizes of the chunks.
    """
    return (num_elements - chunk_sizes(num_elements, world_size, shares)) * element_bytes


def ring_all_gather_bytes(
    num_elements: int, element_bytes: int, world_size: int, shares: Shares = None
) -> Ints:
    """Return the bytes that each rank sends in a ring all-gather; shape `(W,)`, by rank.

    A rank sends all chunks except that of the next rank in the ring.
    """
    return (num_elements - np.roll(chunk_sizes(num_elements, world_size, shares), -1)) * element_bytes


def ring_all_reduce_bytes(
    num_elements: int, element_bytes: int, world_size: int, *, directions: int = 1
) -> Ints:
    """Return the bytes that each rank sends in a ring all-reduce; shape `(W,)`, by rank.

    The sum over ranks is exactly 2(W-1) S for a tensor of S bytes.

    Args:
        num_elements: Number of elements in the tensor.
        element_bytes: Bytes of one element.
        world_size: W, the number of ranks in the ring.
        directions: Number of directions, 1 or 2. With 2, one half of the tensor (the first, rounded up) is sent in the
            direction of increasing ranks, and the other half in the opposite direction.
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
    """Difference between the numbers of neighbouring ranks in a group, for the groups along each parallel axis."""

    tensor: Ints
    context: Ints
    data: Ints
    pipeline: Ints


class Spanned(NamedTuple):
    """Link that one rank uses in its group's ring, as arrays with one element per group."""

    bandwidth: Floats
    """Bytes per second, in one direction."""
    latency: Floats
    """Seconds per message."""


def group_strides(*, tensor: npt.ArrayLike, context: npt.ArrayLike, data: npt.ArrayLike) -> Strides:
    """Return the strides of a layout's groups, given its parallel degrees, which may be arrays.

    Expert-parallel groups and ZeRO's shard groups span the context and data axes, so their stride is that of `context`.
    """
    tensor, context, data = (np.asarray(degree, dtype=np.int64) for degree in (tensor, context, data))
    one = np.ones_like(tensor)
    return Strides(one, tensor, tensor * context, tensor * context * data)


def members_per_node(cluster: Cluster, group_size: npt.ArrayLike, stride: npt.ArrayLike) -> Floats:
    """Return the number of ranks of a group that share a node: per_node / stride, between 1 and the group's size."""
    group, step = np.asarray(group_size, dtype=np.float64), np.asarray(stride, dtype=np.float64)
    members: Floats = np.minimum(np.maximum(np.floor(cluster.per_node / step), 1.0), group)
    return members


def is_inside_node(
    cluster: Cluster, group_size: npt.ArrayLike, stride: npt.ArrayLike
) -> npt.NDArray[np.bool_]:
    """Return whether each group of this size and stride lies within one node."""
    group, step = np.asarray(group_size, dtype=np.float64), np.asarray(stride, dtype=np.float64)
    groups = cluster.per_node / (group * step)  # float division is ten times as fast as integer division
    inside: npt.NDArray[np.bool_] = (group == 1) | (groups == np.floor(groups))
    return inside if cluster.nodes > 1 else np.ones_like(inside)


def spanning_link(cluster: Cluster, group_size: npt.ArrayLike, stride: npt.ArrayLike) -> Spanned:
    """Return the bandwidth and latency of the link that one rank uses in its group's ring.

    For a group within one node, this is the link inside the node. A group across nodes with r ranks per node uses the
    network bandwidth of r devices, because NCCL builds one ring per network card; the link inside the node is a further
    limit. The bandwidth is therefore the minimum of the bandwidth inside the node and r times the bandwidth between
    nodes per device. Every step takes the longer of the two latencies.

    Args:
        cluster: The cluster.
        group_size: Number of ranks in each group; a number or an array.
        stride: Difference between the numbers of neighbouring ranks in each group; a number or an array.
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
    """Return the time of a ring collective over W ranks, in seconds. All numbers may be arrays.

    The time is k ((W-1) α + (W-1)/W S/B), with k = 2 for an all-reduce and k = 1 for other operations (Thakur et al.
    2005). An all-to-all uses the pairwise algorithm, which takes the same time. ``"send_recv"`` is one message, which
    takes α + S/B, or 0 if W = 1.

    Args:
        op: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"all_to_all"`` or ``"send_recv"``.
        num_bytes: S, bytes of the whole tensor: the output of an all-gather, or the input of a reduce-scatter.
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


def all_reduce_bytes(num_bytes: int, world_size: int) -> int:
    """Return the bytes that all W ranks together send in a bandwidth-optimal all-reduce of S bytes: 2(W-1) S."""
    return 2 * (world_size - 1) * num_bytes


_ELEMENT_BYTES = 4
"""Bytes of one gradient or parameter element: runs exchange both in 32 bits."""


def stepwise_bytes(
    compression: Compression,
    buckets: Sequence[Sequence[tuple[int, ...]]],
    world_size: int,
    *,
    step: int,
    steps: int,
    warmup_ended: int | None = None,
    plan: Sequence[int] | None = None,
) -> Ints:
    """Return the bytes that each rank sends in one step; shape `(W,)`, by rank.

    For S bytes of gradients, a 1-bit method sends 2 (W-1)/W S in each warm-up step, and about 1/32 of that afterwards
    (Tang et al. 2021, section 5). PowerSGD also sends 2 (W-1)/W S in warm-up steps, and then only its factors (Vogels
    et al. 2019). Local SGD sends 2 (W-1)/W S of parameters as one tensor in each step that is a multiple of its period,
    and nothing in other steps (Stich 2019, Algorithm 1). An evaluation or a checkpoint in any other step sends the same
    amount once more, which is not counted here.

    Args:
        compression: The compression method with its settings.
        buckets: Shapes of the tensors in each bucket.
        world_size: W, the number of ranks.
        step: Number of the step, from 1.
        steps: Number of steps in the job.
        warmup_ended: For a resumed run of a 1-bit method, the last warm-up step, as in the run's ``resume`` event. The
            warm-up does not start again, even if the job's number of steps has changed. None for a run from the start,
            whose warm-up is computed from the job.
        plan: For an adaptive method, the bits or the rank currently chosen for each tensor, as for `bucket_bytes`.
    """
    sizes = [sum(prod(shape) for shape in shapes) for shapes in buckets]
    if compression.period > 1:  # parameters are averaged periodically, as one tensor
        whole = ring_all_reduce_bytes(sum(sizes), _ELEMENT_BYTES, world_size)
        return whole if step % compression.period == 0 else np.zeros_like(whole)
    warmup = compression.uncompressed(steps) if warmup_ended is None else warmup_ended
    if not compression.is_on or step <= warmup:
        each = [ring_all_reduce_bytes(size, _ELEMENT_BYTES, world_size) for size in sizes]
    else:
        now = compression.at_step(step)
        each = [now.bucket_bytes(shapes, world_size, plan=plan) for shapes in buckets]
    sent: Ints = np.sum(each, axis=0)
    return sent
