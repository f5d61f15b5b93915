"""Bytes that FSDP2 holds in addition to shards, at each moment of a step (torch 2.13).

The rules are those of ``torch/distributed/fsdp/_fully_shard`` with the next unit prefetched in the forward pass
(`set_modules_to_forward_prefetch`), as configured by `shardscope.training.strategies`. A unit has G bytes of
parameters, each padded along its first dimension to a multiple of the number of ranks N (see `analytic.sharding`):

- A unit is gathered into one flat buffer of G bytes, and copied from there into tensors of G bytes in total. After the
  copy, the buffer is freed and the next unit is prefetched.
- Unit 0, the root unit, stays gathered during its whole forward pass, and again during its whole backward pass.
- Stage 3 frees a unit's tensors after the unit's forward pass, and gathers them again for its backward pass, during
  which the preceding unit of the model is prefetched. Stage 2 keeps the tensors until the unit's backward pass.
- After a unit's backward pass, its tensors are freed. Its gradients are copied into a buffer of G bytes and then freed.
  The buffer is reduce-scattered into a gradient shard of G / N bytes, which is kept. The buffer itself is freed when
  the next unit's gradients are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.expert_trace import layer_numbers, part_of
from shardscope.analytic.sharding import padded_elements
from shardscope.spec.model.step import PipelinePiece, StepTrace

if TYPE_CHECKING:
    from shardscope.analytic.memory.module import Moments

Floats = npt.NDArray[np.float64]


class Units(NamedTuple):
    """Bytes of each unit's parameters, including padding; arrays of shape `(units,)`, with unit 0 first."""

    gathered: Floats
    """Bytes of all parameters in each unit."""
    reduced: Floats
    """Bytes of the trained parameters in each unit."""


def units_of(step: StepTrace, ranks: int, element_bytes: int) -> Units:
    """Return the sizes of a traced module's units, padded for `ranks` ranks."""
    units = Units(np.zeros(len(step.units)), np.zeros(len(step.units)))
    for row in step.parameters:
        size = element_bytes * padded_elements(row.shape, ranks)
        units.gathered[row.unit] += size
        units.reduced[row.unit] += size * row.is_trained
    return units


def units_with_experts(
    step: StepTrace, ranks: int, expert_ranks: int, element_bytes: int, *, at_once: bool
) -> tuple[Units, Units]:
    """Return the sizes of the units without experts, and those of the experts in them, which are units of their own.

    Args:
        step: The traced step.
        ranks: Number of ranks over which a unit is sharded.
        expert_ranks: Number of ranks over which experts are sharded; with 1, they are not gathered.
        element_bytes: Bytes of one parameter.
        at_once: Whether all linear layers of a unit's experts are gathered at the same time, and not one at a time.
    """
    dense, experts = (part_of(step, of_experts=of_experts) for of_experts in (False, True))
    apart = units_of(dense, ranks, element_bytes), units_of(experts, expert_ranks, element_bytes)
    gathered = apart[1].gathered
    if expert_ranks == 1:
        gathered = np.zeros_like(gathered)
    elif not at_once:
        layers = np.zeros((len(step.units), 1 + len(experts.parameters)))
        for row, number in zip(experts.parameters, layer_numbers(experts.parameters), strict=True):
            layers[row.unit, number] += element_bytes * padded_elements(row.shape, expert_ranks)
        gathered = layers.max(axis=1)
    return apart[0], apart[1]._replace(gathered=gathered)


def unsharded_bytes(
    moments: Moments,
    units: Units,
    *,
    stage: int,
    ranks: int,
    accumulates: bool = False,
    shares_buffers: bool = False,
) -> Floats:
    """Return the bytes that FSDP2 holds at each moment in addition to parameter shards and activations.

    These are gathered parameters, communication buffers, and gradients.

    Args:
        moments: Moments of a traced step.
        units: Units of the same step, padded for `ranks` ranks.
        stage: ZeRO stage, 2 or 3.
        ranks: N, the number of ranks.
        accumulates: Whether gradient shards from an earlier micro-batch exist at the start.
        shares_buffers: Whether units are exchanged in buffers shared by a host's ranks, whose bytes are counted
            separately. No unit is prefetched then.
    """
    held = gathered_tensors(moments, units.gathered, stage)
    held += units.reduced.sum() / ranks if accumulates else 0.0
    held += _gradients(moments, units.reduced, ranks, is_shared=shares_buffers, accumulates=accumulates)
    return held if shares_buffers else held + _gathering(moments, units.gathered, stage)


def gathered_peak(sizes: Floats, *, stage: int) -> float:
    """Return the peak bytes of gathered parameters on a rank, without the flat buffers from which they are copied.

    In stage 2, all units are gathered at the peak; in stage 3, the root unit and the largest other unit.

    Args:
        sizes: Bytes of each unit's parameters, with unit 0 first; see `gathered_sizes`.
        stage: ZeRO stage, 2 or 3.
    """
    root, *others = sizes.tolist()
    return float(root + (sum(others) if stage == 2 else max(others, default=0.0)))


def gathered_in_stages(
    step: StepTrace,
    stages: Sequence[tuple[int, Sequence[PipelinePiece]]],
    *,
    stage: int,
    ranks: int,
    element_bytes: int,
    expert_ranks: int | None = None,
) -> list[float]:
    """Return the peak bytes of gathered parameters on each rank of a pipeline, as `gathered_peak`.

    A backward pass gathers all units of a pipeline stage, and the reduction of their gradients after it frees them. In
    ZeRO stage 2, a rank keeps those of all its pipeline stages.

    Args:
        step: Trace of the whole model.
        stages: The rank and the layers of each pipeline stage, in order.
        stage: ZeRO stage, 2 or 3.
        ranks: N, the number of ranks over which a unit is sharded.
        element_bytes: Bytes of one parameter.
        expert_ranks: Number of ranks over which experts are sharded, if it is another one; with 1, they are not
            gathered.
    """
    sizes: dict[int, list[float]] = {}
    for rank, pieces in stages:
        used = {place for piece in pieces for place in piece.parameters}
        cut = [(step.parameters[place], ranks) for place in used]
        if expert_ranks is not None:
            cut = [(row, expert_ranks if row.is_expert else ranks) for row, _ in cut]
        size = sum(padded_elements(row.shape, count) for row, count in cut if count > 1 and not row.is_whole)
        sizes.setdefault(rank, []).append(float(element_bytes * size))
    return [sum(sizes[rank]) if stage == 2 else max(sizes[rank]) for rank in sorted(sizes)]


def gathered_tensors(moments: Moments, sizes: Floats, stage: int) -> Floats:
    """Return the bytes of gathered parameters at each moment, without buffers for communication.

    Args:
        moments: Moments of a traced step.
        sizes: Bytes of each unit's parameters.
        stage: ZeRO stage. Stage 2 keeps parameters until a unit's backward pass; stage 3 gathers them for each pass.
    """
    freed = np.where(moments.phase == "leave", sizes[moments.unit], 0.0)
    if stage == 3:
        return np.where(moments.phase == "loss", 0.0, sizes[0] + _own(moments, sizes)) - freed
    so_far, left = np.cumsum(sizes), len(sizes) - 1 - moments.done
    in_forward = so_far[moments.done] + _own(moments, sizes)
    return np.where(_is_forward(moments), in_forward, so_far[left]) - freed


def _gathering(moments: Moments, sizes: Floats, stage: int) -> Floats:
    """Return the bytes of units that are being gathered at each moment: flat buffers, and prefetched units."""
    if stage == 2:
        return np.where(_is_forward(moments), _flat_buffers(moments, sizes), 0.0)
    before = len(sizes) - 1 - moments.done - (moments.unit > 0)  # the next unit in the backward pass
    return np.select(
        [_is_forward(moments), moments.phase == "turn", moments.phase != "loss"],
        [_flat_buffers(moments, sizes), sizes[moments.unit], np.where(before > 0, sizes[before], 0.0)],
        default=0.0,
    )


def _is_forward(moments: Moments) -> npt.NDArray[np.bool_]:
    return np.isin(moments.phase, ("enter", "forward"))


def _own(moments: Moments, sizes: Floats) -> Floats:
    """Return the bytes of the running unit at each moment; 0 if this is the root unit."""
    return np.where(moments.unit > 0, sizes[moments.unit], 0.0)


def _flat_buffers(moments: Moments, sizes: Floats) -> Floats:
    """Return the bytes of the flat buffer that exists at each moment of the forward pass.

    On entry to a unit, this is the unit's own buffer; during the unit's pass, the buffer of the next unit, which is
    prefetched.
    """
    following = np.minimum(moments.done + 1 + (moments.unit > 0), len(sizes))
    return np.where(moments.phase == "enter", sizes[moments.unit], np.append(sizes, 0.0)[following])


def _gradients(moments: Moments, sizes: Floats, ranks: int, *, is_shared: bool, accumulates: bool) -> Floats:
    """Return the bytes for gradients at each moment.

    These are the full gradients of units that are not finished, gradient shards of finished units, and the buffer of
    the last reduction, unless it is shared. New shards are added in place to those of earlier micro-batches, so only
    the newest shard exists in addition.
    """
    unit, done, leaves = moments.unit, moments.done, moments.phase == "leave"
    shards = np.cumsum(np.append(0.0, sizes[:0:-1])) / ranks
    last_done = np.where(done > 0, sizes[len(sizes) - np.maximum(done, 1)], 0.0)
    mine = np.where(unit > 0, moments.own, moments.around)
    others = moments.own + moments.around - mine + moments.arriving
    buffers = 0.0 if is_shared else np.where(leaves, sizes[unit], last_done)
    reduced = np.where(leaves, np.maximum(mine, sizes[unit] / ranks), mine)  # freed after the copy
    backward = np.isin(moments.phase, ("turn", "backward", "leave"))
    finished = last_done / ranks if accumulates else shards[done]
    return np.where(backward, others + reduced + buffers + finished, 0.0)
