"""Bytes sent in one step of a job on Shardscope's ring, for every compression method and each of its phases."""

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

    A 1-bit method sends 2 (W-1)/W S in each warm-up step and about 1/32 of that afterwards (Tang et al. 2021, section
    5). PowerSGD sends as much during its warm-up, and then only its factors (Vogels et al. 2019). Local SGD sends
    2 (W-1)/W S of parameters as one tensor at every `every`-th step, and nothing at the others (Stich 2019, Algorithm
    1). An evaluation or checkpoint between these steps sends the same amount again.

    Args:
        compression: The method with its settings.
        buckets: Shapes of the tensors of each bucket.
        world_size: W, the number of ranks.
        step: Number of the step, from 1.
        steps: Number of steps of the job.
        element_bytes: Bytes of one gradient or parameter element.
        directions: Number of directions in which the ring sends, 1 or 2.
        warmup_ended: The last warm-up step of a 1-bit method in a resumed run, from its ``resume`` event: frozen state
            stays frozen, even if the job's length has changed. None for a run from the start, which uses the job's
            warm-up.
        plan: For an adaptive method, each tensor's current bits or rank, as for its `bucket_bytes`.
    """
    sizes = [sum(prod(shape) for shape in shapes) for shapes in buckets]
    if compression.period > 1:  # parameters are averaged periodically, as one tensor
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
