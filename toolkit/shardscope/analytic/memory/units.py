"""Memory of a transformer under PyTorch's `fully_shard`, at the moments of a step that may be its peak.

Each layer is a unit, and all other parameters are the root unit. The rules are those of `analytic.memory.fully_sharded`
for traced modules, for L layers of G elements each, a root unit of R elements, and N ranks:

- A unit is gathered into its own tensors, besides the rank's shards. In the backward pass, the root unit, the running
  layer and the prefetched one before it are gathered; ZeRO 2 keeps all layers gathered from the forward pass on.
- Between the passes, ZeRO 3 has no layer gathered. By default, the root unit stays gathered; the strategies of
  Shardscope's jobs, which train in float32 or under autocast, free it as well.
- Gradients of a unit are whole until its backward pass ends. Then they are reduced from a buffer, which is freed when
  the next unit's gradients are copied. Gradients of the embedding and the output projection are whole until the end.

Among layers of one kind, memory changes by the same amount from layer to layer of the backward pass, so it is largest
at the beginning or the end. New gradients are added in place to those of earlier micro-batches, so there is no second
set of shards. As the forward pass ends, a layer runs while the next one is gathered into a flat buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.memory.moments import (
    BEGINS,
    ENDS,
    FORWARD,
    HEAD,
    LAST_BUT_ONE,
    LAST_MIXED,
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


class Layers(NamedTuple):
    """One value for layers with experts and one for layers without experts.

    In the backward pass, layers with experts come first, because in the model they come last.
    """

    mixed: Floats
    dense: Floats

    def done(self, count: Floats, mixed: Floats) -> Floats:
        """Return the sum over the first `count` layers of the backward pass, of which `mixed` have experts."""
        first = np.minimum(count, mixed)
        return np.asarray(first * self.mixed + (count - first) * self.dense)

    def after(self, count: Floats, mixed: Floats) -> Floats:
        """Return the value of the layer whose backward pass runs after the backward passes of `count` layers."""
        return np.where(count < mixed, self.mixed, self.dense)


class Sizes(NamedTuple):
    """Elements of the units of a rank's model, without sharding unless stated otherwise."""

    root: Floats
    layer: Layers
    layer_shards: Layers
    """A rank's shards of a layer."""
    every: Floats
    """All units."""
    shards: Floats
    """A rank's shards of all units."""
    matrix: Layers
    """The largest matrix of a layer, or all of its experts."""
    mixed: Floats
    """Number of layers with experts."""


def sizes_of(rows: LayoutRows, own: Elements, held: Holding) -> Sizes:
    """Return the sizes of a rank's units."""
    table, tensor, ranks = rows.weights, rows.shape.tensor, rows.zero_ranks
    own_head = held.head * (1 - held.embedding) if table.tied else held.head
    words = held.embedding * table.table + own_head * table.head
    root = held.embedding * table.before + held.head * table.behind + words / tensor
    repeated = table.repeated_keys(tensor) if table.key_heads < rows.model.heads else 0.0
    dense = (table.attention_params + table.dense_params) / tensor + table.whole + repeated
    none = np.zeros_like(dense)
    if own.experts is None or own.layer_experts is None or held.mixed is None:
        layer, parts = Layers(none, dense), Layers(none, dense / ranks)
        return Sizes(root, layer, parts, own.dense, own.dense / ranks, Layers(none, own.matrix), none)
    routed = (table.attention_params + table.shared_params) / tensor + table.whole_mixed + repeated
    return Sizes(
        root,
        Layers(routed + own.layer_experts, dense),
        Layers(routed / ranks + own.layer_experts / rows.expert_ranks, dense / ranks),
        own.dense + own.experts,
        own.dense / ranks + own.experts / rows.expert_ranks,
        Layers(np.maximum(own.matrix, own.layer_experts), own.matrix),
        held.mixed,
    )


def unit_moments(
    rows: LayoutRows,
    own: Elements,
    held: Holding,
    *,
    loss: Floats,
    later: Floats,
    in_layer: Floats,
    in_forward: Floats,
    accumulates: npt.NDArray[np.bool_],
) -> tuple[UnitMoment, ...]:
    """Return the memory of the ranks of each layout at each moment that may be the peak.

    Args:
        rows: The layouts; results are meant for those of which `rows.gathers_units` is true.
        own: Numbers of parameters on the rank.
        held: Layers on the rank.
        loss: Temporary bytes as the logits' gradient is computed.
        later: Part of `loss` that is not yet allocated when the loss is computed.
        in_layer: Temporary bytes in the backward pass of a layer.
        in_forward: Temporary bytes in the forward pass of a layer.
        accumulates: Whether gradients of an earlier micro-batch exist.
    """
    recipe, tokens, count = rows.recipe, rows.shape.tokens, held.layers
    width, gradient = recipe.copies if rows.casts else recipe.parameter, recipe.gradient
    sizes, keeps_all, nothing = sizes_of(rows, own, held), rows.layouts.zero == 2, np.zeros(1)
    mixed = sizes.mixed
    root, whole, shards = width * sizes.root, width * sizes.every, gradient * sizes.shards
    words = width * own.vocabulary

    def sharded(done: Floats) -> Floats:
        """Return the bytes of gradient shards: new shards, or those of earlier micro-batches and one to add."""
        last = gradient * sizes.layer_shards.after(np.maximum(done - 1, 0.0), mixed) * (done > 0)
        return np.where(accumulates, shards + last, gradient * sizes.layer_shards.done(done, mixed))

    def gathered(done: Floats, ahead: npt.NDArray[np.bool_]) -> Floats:
        left = whole - width * sizes.layer.done(done, mixed)
        running = width * sizes.layer.after(done, mixed)
        following = width * sizes.layer.after(done + 1, mixed) * ahead
        return np.where(keeps_all, left, np.minimum(root + running + following, left))

    def in_the_layer_after(done: Floats, moment: int) -> UnitMoment:
        buffer = gradient * sizes.layer.after(np.maximum(done - 1, 0.0), mixed) * (done > 0)
        bucket = words + width * sizes.matrix.after(done, mixed) + buffer
        return UnitMoment(moment, done, sharded(done), in_layer, gathered(done, done < count - 1), bucket)

    at_loss = np.where(keeps_all, whole, root * rows.casts)
    before, last_layer = sharded(nothing), width * sizes.layer.after(nothing, mixed)
    # the last layer runs, with its copy by autocast, or the one before it, while the last one is gathered
    in_last = 2 * last_layer - recipe.copies * sizes.layer.after(nothing, mixed) * (not rows.casts)
    in_last = np.maximum(in_last, last_layer)
    hidden = recipe.activation * rows.model.hidden * tokens / rows.shape.divided
    logits = held.head * recipe.activation * rows.model.vocab * tokens / rows.shape.tensor
    first = gradient * sizes.layer.after(count - 1, mixed)
    copies = 3 if rows.weights.tied else 1  # of the head, of the embedding, and their sum
    own_first = width * sizes.layer.after(count - 1, mixed)
    last = np.maximum(np.maximum(copies * words, words + own_first) + first, gradient * sizes.root)
    return (
        UnitMoment(FORWARD, nothing, before, in_forward, np.where(keeps_all, whole, root + in_last), nothing),
        UnitMoment(LOSS, nothing, before, loss - later, at_loss, nothing),
        UnitMoment(LOGITS, nothing, before, loss, at_loss, nothing),
        UnitMoment(
            HEAD, nothing, before, logits + 3 * hidden, np.where(keeps_all, whole, root + last_layer), words
        ),
        in_the_layer_after(nothing, BEGINS),
        in_the_layer_after(np.minimum(1.0, count - 1), SECOND),
        in_the_layer_after(np.maximum(mixed - 2, 0.0), LAST_MIXED),
        in_the_layer_after(np.maximum(count - 2, 0.0), LAST_BUT_ONE),
        in_the_layer_after(count - 1, ENDS),
        UnitMoment(ROOT, count, sharded(count), nothing, root, last),
        UnitMoment(UPDATE, count, shards, nothing, nothing, nothing),
    )


def forward_bytes(rows: LayoutRows) -> Floats:
    """Return the bytes of a layer's temporary tensors in its forward pass, around its activation function.

    These are the function's inputs and output, the input of the layer, two more tensors of the residual stream, and the
    input of the first matrix product.
    """
    model, act, shape = rows.model, rows.recipe.activation, rows.shape
    stream = model.hidden * (3 * (act + rows.wider) + act) / shape.divided
    inner = shape.tokens * (act * (2 + model.gated) * model.ffn / shape.tensor + stream)
    return np.asarray(np.maximum(inner, rows.in_mixed) if model.mixture else inner)


def receive_bytes(rows: LayoutRows, own: Elements, held: Holding) -> Floats:
    """Return the bytes of a ring's receive buffers: two slices, of at most 4 MiB each, of a rank's chunk.

    ZeRO 1 reduces buckets of at most 25 MiB, ZeRO 2 and 3 units; see `analytic.memory.held.ring_buffer_bytes`.
    """
    zero, width = rows.layouts.zero, rows.recipe.parameter
    sizes = sizes_of(rows, own, held)
    unit = np.maximum(sizes.root, np.maximum(sizes.layer.mixed, sizes.layer.dense))
    whole = np.where(zero > 1, unit, np.minimum(sizes.every, 25 * 2**20 / width))
    chunk = width * whole / rows.zero_ranks
    slices = np.maximum(1.0, np.ceil(chunk / (4 * 2**20)))
    return np.asarray(2 * chunk / slices * ((zero > 0) & (rows.zero_ranks > 1)))
