"""The moment of a training step at which a rank's memory peaks.

Gradients and saved activations are rarely all allocated at the same time. Five moments are compared, and the one with
the most memory is the peak:

- as the loss is computed, with all saved activations, the logits, gradients only if an earlier micro-batch has left
  some, and autocast's copies of weights;
- as the logits' gradient is computed, with the same, except the weight copies of recomputed layers;
- as the backward pass begins, in the last layer, with all saved activations and the gradients of that layer and of the
  output projection;
- as the backward pass ends, in the first layer, with all gradients, when the activations of the other layers are freed;
- in the update, with all gradients and no activations. PyTorch's update is assumed to be fused, without temporary
  tensors; the default of `torch.optim.AdamW` on CUDA, foreach, allocates a float32 copy of a rank's weights, which is
  not counted.

During the backward pass, gradients grow and activations shrink in proportion to the finished layers, so their sum is
largest at its beginning or end. Gradients of an earlier micro-batch exist at the first three moments if the rank runs
more micro-batches than it keeps in flight, or if the framework keeps gradients allocated from step to step
(`Framework.keeps_gradients_from`).
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.memory.rows import Floats

if TYPE_CHECKING:
    from shardscope.analytic.memory.stage import Blocks, Early

LOSS, LOGITS, BEGINS, ENDS, UPDATE, HEAD, SECOND, LAST_BUT_ONE, ROOT, FORWARD, LAST_MIXED = range(11)
AT_LOSS = (LOSS, LOGITS)
MOMENTS = (
    "as the loss is computed",
    "as the logits' gradient is computed",
    "as the backward pass begins",
    "as the backward pass ends",
    "in the update",
    "as the output projection's gradient is computed",
    "in the backward pass, after its first layer",
    "in the backward pass, before its last layer",
    "as gradients outside layers are reduced",
    "as the forward pass ends",
    "in the backward pass, before its last layer with experts",
)
"""Names of the moments, by number."""


class UnitMoment(NamedTuple):
    """Memory of a rank that gathers whole units at one moment of a step, in bytes; see `memory.units`."""

    moment: int
    """Index into `MOMENTS`."""
    layers_done: Floats
    """Number of layers whose backward pass has ended."""
    gradients: Floats
    working: Floats
    """Temporary tensors of the loss or of a layer."""
    gathered: Floats
    bucket: Floats
    """Gradients that are not reduced yet, and the buffer from which they are reduced."""


class Peak(NamedTuple):
    """Moment of a rank's peak, and the bytes then of all memory that varies within a step, for a table of layouts."""

    moment: npt.NDArray[np.int64]
    """Index into `MOMENTS`."""
    gradients: Floats
    activations: Floats
    copies: Floats
    """Low-precision copies of weights."""
    buffers: Floats
    """Temporary tensors, gathered weights, and buckets of gradients."""

    @property
    def total(self) -> Floats:
        """Total bytes of all memory that varies within a step."""
        return self.gradients + self.activations + self.copies + self.buffers


def gradients_of(blocks: Blocks) -> Floats:
    """Return the bytes of all gradients of a rank."""
    return blocks.dense.gradients + blocks.experts.gradients


def peak_of(blocks: Blocks, gradients: Floats, offloaded: Floats, here: npt.NDArray[np.bool_]) -> Peak:
    """Return the peak of a rank.

    Args:
        blocks: Memory of the rank by block.
        gradients: All gradients that are on the device.
        offloaded: Saved activations that are not on the device, but on its host.
        here: Whether weights, and therefore their low-precision copies, are on the device.
    """
    all_saved = blocks.saved + blocks.embedding_mask + blocks.outputs
    saved, copies = all_saved - offloaded, blocks.copies * here
    at_loss = blocks.at_loss + blocks.gathered + blocks.standing
    in_layer = blocks.in_layer + blocks.gathered + blocks.bucket
    if blocks.early is None:
        moment = np.where(at_loss >= in_layer, LOGITS, BEGINS)
        return Peak(moment, gradients, saved, copies, np.maximum(at_loss, in_layer))
    early = blocks.early
    if blocks.units:
        by_unit = (_in_units(blocks, early, unit, saved, all_saved, here) for unit in blocks.units)
        return reduce(_larger, by_unit)
    in_layer += early.arriving
    before = gradients * early.accumulates
    begun = np.where(early.accumulates, gradients, np.minimum(early.gradients, gradients))
    left = np.minimum(saved, all_saved - blocks.saved_once * (1 - 1 / early.layers))
    begin, end, update = (part * here for part in (early.copies_begin, early.copies_end, early.copies_update))
    head = early.copies_head * here
    best, *others = (
        Peak(np.full(1, LOSS), before, saved, copies + head, at_loss - early.logits_later),
        Peak(np.full(1, LOGITS), before, saved, begin + head, at_loss),
        Peak(np.full(1, BEGINS), begun, saved, begin, in_layer),
        Peak(np.full(1, ENDS), gradients, left, end, in_layer),
        Peak(np.full(1, UPDATE), gradients, np.zeros(1), update, blocks.update + blocks.copied),
    )
    if early.in_forward is not None:
        most = saved - blocks.saved_once / early.layers
        buffers = early.in_forward + blocks.gathered + blocks.standing
        others.append(Peak(np.full(1, FORWARD), before, most, copies, buffers))
    for other in others:
        best = _larger(best, other)
    return best


def _larger(one: Peak, other: Peak) -> Peak:
    is_more = other.total > one.total
    return Peak(*(np.where(is_more, theirs, ours) for theirs, ours in zip(other, one, strict=True)))


def _in_units(  # noqa: PLR0917
    blocks: Blocks,
    early: Early,
    unit: UnitMoment,
    saved: Floats,
    all_saved: Floats,
    here: npt.NDArray[np.bool_],
) -> Peak:
    """Return the memory at one moment of a step, for a rank that gathers whole units."""
    done = unit.layers_done / early.layers
    left = np.minimum(saved, all_saved - blocks.saved_once * done)
    copies = blocks.copies
    if unit.moment == UPDATE:
        left, copies = np.zeros(1), early.copies_update
    elif unit.moment == FORWARD:
        left = saved - blocks.saved_once / early.layers
    elif unit.moment in AT_LOSS:
        copies = (copies if unit.moment == LOSS else early.copies_begin) + early.copies_head
    else:
        copies = np.maximum(early.copies_end, early.copies_begin * (1 - done))
    buffers = unit.working + unit.gathered + unit.bucket
    return Peak(np.full(1, unit.moment), unit.gradients * here, left, copies * here, buffers)
