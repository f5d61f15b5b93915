"""Memory of a transformer under PyTorch's `fully_shard`, at the moments of a step that may be its peak.

Each layer is a unit, and all other parameters are the root unit. The rules are those of `analytic.memory.fully_sharded`
for traced modules, for L equal layers of G elements each, a root unit of R elements, and N ranks:

- A unit is gathered into tensors of its own, beside the rank's shards. In the backward pass, the root unit, the running
  layer and the prefetched one before it are gathered; ZeRO 2 keeps all layers gathered from the forward pass on.
- Between the passes, ZeRO 3 has no layer gathered. By default, the root unit stays gathered; the strategies of
  Shardscope's jobs, which train in float32 or under autocast, free it as well.
- Gradients of a unit are whole until its backward pass ends. Then they are reduced from a buffer, which is freed when
  the next unit's gradients are copied. Gradients of the embedding and the output projection are whole until the end.

Between the second and the second-to-last layer of the backward pass, memory changes by the same amount from layer to
layer, so it is largest at one end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.memory.moments import (
    BEGINS,
    ENDS,
    HEAD,
    LAST_BUT_ONE,
    LOGITS,
    LOSS,
    ROOT,
    SECOND,
    UPDATE,
    UnitMoment,
)
from shardscope.analytic.memory.rows import Floats, Holding, LayoutRows

if TYPE_CHECKING:
    from shardscope.analytic.memory.stage import Elements

AHEAD = 1
"""Number of layers that are gathered in advance."""


class Sizes(NamedTuple):
    """Elements of the units of a rank's model, without sharding."""

    root: Floats
    layer: Floats
    """Elements of the largest layer."""
    every: Floats
    """Elements of all units."""
    shards: Floats
    """Elements of a rank's shards of all units."""
    matrix: Floats
    """Elements of the largest matrix of a layer, with the layer's experts."""


def sizes_of(rows: LayoutRows, own: Elements, held: Holding) -> Sizes:
    """Return the sizes of a rank's units."""
    table = rows.weights
    own_head = held.head * (1 - held.embedding) if table.tied else held.head
    words = held.embedding * table.table + own_head * table.head
    root = held.embedding * table.before + held.head * table.behind + words / rows.shape.tensor
    layer, every, shards, matrix = own.layer, own.dense, own.dense / rows.zero_ranks, own.matrix
    if own.experts is not None and own.layer_experts is not None:
        layer, every = layer + own.layer_experts, every + own.experts
        shards, matrix = shards + own.experts / rows.expert_ranks, matrix + own.layer_experts
    return Sizes(root, layer, every, shards, matrix)


def unit_moments(
    rows: LayoutRows,
    own: Elements,
    held: Holding,
    *,
    loss: Floats,
    later: Floats,
    in_layer: Floats,
    accumulates: npt.NDArray[np.bool_],
) -> tuple[UnitMoment, ...]:
    """Return the memory of the ranks of each layout at each moment that may be the peak.

    Args:
        rows: The layouts; results are meant for those of which `rows.gathers_units` is true.
        own: Numbers of parameters on the rank.
        held: Layers on the rank.
        loss: Temporary bytes as the logits' gradient is computed.
        later: The part of `loss` that does not exist yet as the loss is computed.
        in_layer: Temporary bytes in the backward pass of a layer.
        accumulates: Whether gradients of an earlier micro-batch exist.
    """
    recipe, tokens, count = rows.recipe, rows.shape.tokens, held.layers
    width, gradient = recipe.copies if rows.casts else recipe.parameter, recipe.gradient
    sizes, keeps_all, nothing = sizes_of(rows, own, held), rows.layouts.zero == 2, np.zeros(1)
    root, layer, whole = width * sizes.root, width * sizes.layer, width * sizes.every
    shards = gradient * sizes.shards
    before, a_layer_shards = shards * accumulates, shards * sizes.layer / sizes.every
    words, buffer = width * own.vocabulary, gradient * sizes.layer

    def gathered(done: Floats, running: Floats | int) -> Floats:
        left = whole - done * layer
        return np.where(keeps_all, left, np.minimum(root + running * layer, left))

    def in_the_layer_after(done: Floats, moment: int) -> UnitMoment:
        running = np.where(done < count - 1, 1.0 + AHEAD, 1.0)
        bucket = words + width * sizes.matrix + buffer * (done > 0)
        return UnitMoment(
            moment, done, before + done * a_layer_shards, in_layer, gathered(done, running), bucket
        )

    at_loss = np.where(keeps_all, whole, root * rows.casts)
    hidden = recipe.activation * rows.model.hidden * tokens / rows.shape.divided
    logits = held.head * recipe.activation * rows.model.vocab * tokens / rows.shape.tensor
    last = np.maximum(root + buffer, gradient * sizes.root) - root + width * sizes.root
    return (
        UnitMoment(LOSS, nothing, before, loss - later, at_loss, nothing),
        UnitMoment(LOGITS, nothing, before, loss, at_loss, nothing),
        UnitMoment(HEAD, nothing, before, logits + 3 * hidden, gathered(nothing, AHEAD), words),
        in_the_layer_after(nothing, BEGINS),
        in_the_layer_after(np.minimum(1.0, count - 1), SECOND),
        in_the_layer_after(np.maximum(count - 2, 0.0), LAST_BUT_ONE),
        in_the_layer_after(count - 1, ENDS),
        UnitMoment(ROOT, count, before + count * a_layer_shards, nothing, root, last),
        UnitMoment(UPDATE, count, shards, nothing, nothing, nothing),
    )
