"""Bytes of a step of a job on our ring, whatever its method of compression does at that step."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from shardscope.analytic.communication.ring import Ints, ring_all_reduce_bytes
from shardscope.spec.compression import Compression


def stepwise_bytes(
    compression: Compression,
    buckets: Sequence[Sequence[tuple[int, ...]]],
    world_size: int,
    *,
    step: int,
    steps: int,
    element_bytes: int = 4,
    directions: int = 1,
    warmup_ended: int | None = None,
    plan: Sequence[int] | None = None,
) -> Ints:
    """Bytes that each rank sends in one step; shape `(W,)`, by rank.

    A 1-bit method sends 2 (W-1)/W S at each of its warm-up steps and about a 32nd of that afterwards (Tang et al. 2021,
    section 5); PowerSGD as much while it warms up, and then its factors (Vogels et al. 2019). Local SGD sends nothing
    but, at every `every`-th step, 2 (W-1)/W S of parameters as one tensor (Stich 2019, Algorithm 1); evaluations and
    checkpoints between them cost as much once more.

    Args:
        compression: The method with its settings.
        buckets: Shapes of the tensors of each bucket.
        world_size: W, the ranks.
        step: From 1.
        steps: Of the job.
        element_bytes: Of a gradient or parameter.
        directions: Of the ring.
        warmup_ended: The last step of a 1-bit method's warm-up in a run that goes on from another, as its ``resume``
            event says: what is frozen stays so, whatever the length of the job would be now. None for a run from its
            start, whose warm-up is the job's.
        plan: Of a method that adapts: each tensor's bits or rank in force, as for its `bucket_bytes`.
    """
    sizes = [sum(prod(shape) for shape in shapes) for shapes in buckets]
    if compression.period > 1:  # parameters are averaged now and then, as one tensor
        whole = ring_all_reduce_bytes(sum(sizes), element_bytes, world_size, directions=directions)
        return whole if step % compression.period == 0 else np.zeros_like(whole)
    warmup = compression.uncompressed(steps) if warmup_ended is None else warmup_ended
    if not compression.is_on or step <= warmup:
        each = [
            ring_all_reduce_bytes(size, element_bytes, world_size, directions=directions) for size in sizes
        ]
    else:
        now = compression.at_step(step)
        each = [now.bucket_bytes(shapes, world_size, directions=directions, plan=plan) for shapes in buckets]
    sent: Ints = np.sum(each, axis=0)
    return sent
