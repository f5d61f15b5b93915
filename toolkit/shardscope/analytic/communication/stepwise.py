"""Bytes that ranks send in one step over Shardscope's ring, for every compression method, during and after warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from shardscope.analytic.communication.ring import Ints, ring_all_reduce_bytes
from shardscope.spec.compression import Compression

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
