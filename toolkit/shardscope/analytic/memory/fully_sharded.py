"""Bytes that FSDP2 holds for a module's units, in addition to shards, at each moment of a step (torch 2.13).

The rules are those of ``torch/distributed/fsdp/_fully_shard`` with the next unit prefetched in the forward pass
(`set_modules_to_forward_prefetch`), as `shardscope.training.strategies` sets it up. With G bytes of a unit's
parameters, each padded to a multiple of the number of ranks along its first dimension (see `analytic.sharding`):

- a unit is gathered into one flat buffer of G bytes and copied out into tensors of G bytes in total; the buffer is
  freed after the copy, which is when the next unit is prefetched;
- unit 0, the root unit, stays gathered for its whole forward pass and again for its whole backward pass;
- stage 3 frees a unit's tensors after its forward pass and gathers it again in the backward pass, where the preceding
  unit in the model is prefetched; stage 2 keeps all tensors from the forward pass to the unit's backward pass;
- after a unit's backward pass its tensors are freed, its gradients are copied into a buffer of G bytes, and reduced
  into another of G / N; the gradients are freed after the copy, the buffer when the next unit's gradients are copied,
  and the result stays as the gradient's shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.sharding import padded_elements
from shardscope.spec.model.step import StepTrace

if TYPE_CHECKING:
    from shardscope.analytic.memory.module import Moments

Floats = npt.NDArray[np.float64]


class Units(NamedTuple):
    """Bytes of each unit's parameters, including padding, unit 0 first; shape `(units,)`."""

    gathered: Floats
    reduced: Floats
    """Bytes of the trained parameters of each unit."""


def units_of(step: StepTrace, ranks: int, element_bytes: int) -> Units:
    """Return the units of a traced module on `ranks` ranks."""
    units = Units(np.zeros(len(step.units)), np.zeros(len(step.units)))
    for row in step.parameters:
        size = element_bytes * padded_elements(row.shape, ranks)
        units.gathered[row.unit] += size
        units.reduced[row.unit] += size * row.is_trained
    return units


def beside_the_shards(
    moments: Moments, units: Units, *, stage: int, ranks: int, accumulates: bool = False
) -> Floats:
    """Bytes in addition to shards and activations at each moment: gathered units, buffers, gradients.

    Args:
        moments: Moments of a traced step.
        units: Units of the same step, on `ranks` ranks.
        stage: ZeRO stage, 2 or 3.
        ranks: N, the number of ranks.
        accumulates: Whether gradient shards of an earlier micro-batch exist from the start.
    """
    gathered = _kept_gathered(moments, units.gathered) if stage == 2 else _gathered(moments, units.gathered)
    kept = units.reduced.sum() / ranks if accumulates else 0.0
    return gathered + kept + _gradients(moments, units.reduced, ranks)


def gathered_peak(step: StepTrace, *, stage: int, ranks: int, element_bytes: int) -> float:
    """Peak bytes of gathered parameters on a rank, without the flat buffers from which they are copied.

    Stage 2 keeps all units, stage 3 the root unit and one other.

    Args:
        step: A traced step.
        stage: ZeRO stage, 2 or 3.
        ranks: N, the number of ranks over which a unit is sharded.
        element_bytes: Bytes of one parameter.
    """
    root, *others = units_of(step, ranks, element_bytes).gathered.tolist()
    return float(root + (sum(others) if stage == 2 else max(others, default=0.0)))


def _kept_gathered(moments: Moments, sizes: Floats) -> Floats:
    """Bytes of gathered tensors in stage 2, which stay from a unit's forward to its backward pass."""
    so_far, left = np.cumsum(sizes), len(sizes) - 1 - moments.done
    in_forward = so_far[moments.done] + _own(moments, sizes) + _asked_for(moments, sizes)
    in_backward = so_far[left] - np.where(moments.phase == "leave", sizes[moments.unit], 0.0)
    return np.where(np.isin(moments.phase, ("enter", "forward")), in_forward, in_backward)


def _gathered(moments: Moments, sizes: Floats) -> Floats:
    """Bytes of gathered tensors in stage 3, which exist in a unit's forward and in its backward pass."""
    phase, own, around = moments.phase, _own(moments, sizes), sizes[0]
    before = len(sizes) - 1 - moments.done - (moments.unit > 0)  # the next one in the backward pass
    in_forward = around + own + _asked_for(moments, sizes)
    turning = around + own + sizes[moments.unit]
    in_backward = around + own + np.where(before > 0, sizes[before], 0.0)
    left = in_backward - sizes[moments.unit]
    return np.select(
        [np.isin(phase, ("enter", "forward")), phase == "turn", phase == "backward", phase == "leave"],
        [in_forward, turning, in_backward, left],
        default=0.0,  # at the loss
    )


def _own(moments: Moments, sizes: Floats) -> Floats:
    return np.where(moments.unit > 0, sizes[moments.unit], 0.0)


def _asked_for(moments: Moments, sizes: Floats) -> Floats:
    """Bytes of the prefetched unit's flat buffer in the forward pass; on entry to a unit, of the unit's own buffer."""
    following = np.minimum(moments.done + 1 + (moments.unit > 0), len(sizes))
    return np.where(moments.phase == "enter", sizes[moments.unit], np.append(sizes, 0.0)[following])


def _gradients(moments: Moments, sizes: Floats, ranks: int) -> Floats:
    """Bytes of full gradients of unfinished units, gradient shards of finished units, and reduction buffers."""
    unit, done, leaves = moments.unit, moments.done, moments.phase == "leave"
    shards = np.cumsum(np.append(0.0, sizes[:0:-1])) / ranks
    last_done = np.where(done > 0, sizes[len(sizes) - np.maximum(done, 1)], 0.0)
    mine = np.where(unit > 0, moments.own, moments.around)
    others = moments.own + moments.around - mine + moments.arriving
    buffers = np.where(leaves, sizes[unit], last_done)
    reduced = np.where(leaves, np.maximum(mine, sizes[unit] / ranks), mine)  # freed after the copy
    backward = np.isin(moments.phase, ("turn", "backward", "leave"))
    return np.where(backward, others + reduced + buffers + shards[done], 0.0)
