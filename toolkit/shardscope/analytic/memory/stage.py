"""Memory of one pipeline rank in bytes, split into blocks such as saved activations, for a table of layouts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.memory import torch_pipelines
from shardscope.analytic.memory.activations import FULL, MASK_BYTES, logit_bytes
from shardscope.analytic.memory.architecture import torch_workspace_bytes
from shardscope.analytic.memory.moments import UnitMoment
from shardscope.analytic.memory.offload import OFFLOADS_OPTIMIZER
from shardscope.analytic.memory.rows import NONE, Floats, Holding, LayoutRows, held_by
from shardscope.analytic.memory.states import ElementBytes, ModelStates, optimizer_bytes, partitioned
from shardscope.analytic.memory.units import forward_bytes, receive_bytes, unit_moments
from shardscope.analytic.memory.weights import WeightShapes
from shardscope.analytic.recomputation import recomputed_by_kind

NO_STATES = ModelStates(NONE, NONE, NONE)


class Early(NamedTuple):
    """Memory of a rank at moments of a step at which not all gradients exist, in bytes; see `moments`."""

    accumulates: npt.NDArray[np.bool_]
    """Whether all gradients already exist at the loss."""
    layers: Floats
    """Number of layers on the rank."""
    gradients: Floats
    """Gradients of one layer and of the output projection, if the rank has it."""
    logits_later: Floats
    """Additional bytes for logits when their gradient is computed, compared with when the loss is computed."""
    arriving: Floats
    """Gradients that have been computed, but not yet added to those of an earlier micro-batch."""
    in_forward: Floats | None
    """Temporary tensors in the forward pass of a layer, with its input; None if they never determine the peak."""
    copies_head: Floats
    """The low-precision copy of the output projection, which lives until its backward pass."""
    copies_begin: Floats
    """Low-precision copies of weights as the backward pass of layers begins."""
    copies_end: Floats
    """Low-precision copies of weights as the backward pass ends."""
    copies_update: Floats
    """Low-precision copies of weights in the update."""


class Blocks(NamedTuple):
    """Memory of one rank by block, in bytes, without offloading."""

    dense: ModelStates
    """States of all parameters except routed experts."""
    experts: ModelStates
    """States of routed experts."""
    copies: Floats
    """Low-precision copies of weights."""
    saved: Floats
    """Activations that layers save for the backward pass, for all micro-batches in flight."""
    saved_once: Floats
    """Activations that layers save for one micro-batch."""
    kept: Floats
    """Saved activations that stay on the device if all other saved activations are offloaded."""
    embedding_mask: Floats
    """Mask of the dropout after the embedding."""
    outputs: Floats
    """Outputs of the stage that its pipeline keeps."""
    at_loss: Floats
    """Temporary tensors in the backward pass of the loss; 0 on ranks without the loss."""
    in_layer: Floats
    """Temporary tensors in the backward pass of a layer, including recomputed activations."""
    gathered: Floats
    """Parameters gathered from other ranks' shards."""
    bucket: Floats
    """Gradients to be reduced: a layer's gradients of other ranks' shards, flat buffers, or copies of all gradients."""
    standing: Floats
    """Part of `bucket` that is also allocated at the loss."""
    copied: Floats
    """Copies of all gradients, which are always allocated."""
    update: Floats
    """Temporary tensors of the update, when no activations are saved."""
    placeholders: Floats
    """Placeholder gradients, as in `Framework.reused_gradient`."""
    workspace: Floats
    """Workspace for matrix products."""
    received: Floats
    """Buffers in which a rank of a ring receives parts of gradients and weights."""
    early: Early | None
    """Memory at moments before all gradients exist; None if they always exist."""
    units: tuple[UnitMoment, ...]
    """Memory at each moment, for ranks that gather whole units; empty for all other ranks."""


class Elements(NamedTuple):
    """Numbers of parameters on one rank, without sharding by ZeRO."""

    dense: Floats
    """All parameters except routed experts."""
    layer: Floats
    """Parameters of the largest layer, without routed experts."""
    matrix: Floats
    """Parameters of the largest matrix in layers, without routed experts."""
    vocabulary: Floats
    """Parameters of the embedding table, or of the output projection; 0 if the rank has neither."""
    aside: Floats
    """Parameters of embeddings and output projection, and those that every tensor-parallel rank replicates."""
    experts: Floats | None
    """Parameters of all routed experts; None if the model has no experts."""
    layer_experts: Floats | None
    """Parameters of the routed experts in one layer."""

    @property
    def matrices(self) -> Elements:
        """The numbers of parameters that have low-precision copies: all except those counted in `aside`."""
        dense = self.dense - self.aside
        layer, matrix = np.minimum(self.layer, dense), np.minimum(self.matrix, dense)
        return self._replace(dense=dense, layer=layer, matrix=matrix, vocabulary=np.zeros_like(dense))


def blocks_of(rows: LayoutRows, place: Floats) -> Blocks:
    """Return the memory of the rank at position `place` of each layout's pipeline, by block.

    `rows` must not mix layouts that gather whole units with layouts that do not.
    """
    assert not rows.has_units or rows.gathers_units.all()
    model, framework = rows.model, rows.framework
    held = held_by(place, rows.pipeline, dense=model.mixture.dense_layers if model.mixture else None)
    own = elements_of(rows, held)
    once, in_layer = _saved(rows, held)
    copies, copied = _copies(rows, own), _copied(rows, own)
    bucket = _bucket(rows, own, copied)
    outputs, whole_output = _outputs(rows, own, held, once)
    received = receive_bytes(rows, own, held) if framework.gathers_units and not rows.casts else NONE
    saved, more_copies = once * held.in_flight, NONE
    if rows.has_torch:
        received = received + torch_pipelines.messages(rows, held)
        saved = saved - torch_pipelines.inputs(rows, held)
        more_copies = torch_pipelines.copies_in_flight(rows, held, copies)
    dense, experts = _dense_states(rows, own, held), _expert_states(rows, own, held)
    early = _early(rows, own, held, dense.gradients + experts.gradients, copies, more_copies)
    units: tuple[UnitMoment, ...] = ()
    if early is not None and rows.has_units:
        units = unit_moments(
            rows, own, held, loss=held.head * rows.at_loss, later=early.logits_later, in_layer=in_layer,
            in_forward=forward_bytes(rows), accumulates=early.accumulates,
        )  # fmt: skip
    return Blocks(
        dense=dense,
        experts=experts,
        copies=copies + more_copies,
        saved=saved,
        saved_once=once,
        kept=_running(rows, held, once),
        embedding_mask=_embedding_mask(rows, held),
        outputs=outputs,
        at_loss=held.head * rows.at_loss,
        in_layer=in_layer + whole_output,
        gathered=_gathered_weights(rows, own),
        bucket=bucket,
        standing=bucket * (rows.layouts.zero >= 3) if framework.keeps_buckets else copied,
        copied=copied,
        update=_update(rows, own),
        placeholders=_placeholders(rows, held),
        workspace=np.full(1, torch_workspace_bytes(rows.device) * framework.has_workspaces),
        received=received,
        early=early,
        units=units,
    )


def elements_of(rows: LayoutRows, held: Holding) -> Elements:
    """Return the numbers of parameters that a rank holds, without sharding by ZeRO."""
    table, tensor = rows.weights, rows.shape.tensor
    layer: Floats | int = table.attention_params + table.dense_params
    repeated = table.repeated_keys(tensor) if table.key_heads < rows.model.heads else 0.0
    whole = held.layers * table.whole + held.embedding * table.before + held.head * table.behind
    own_head = held.head * (1 - held.embedding) if table.tied else held.head
    words = held.embedding * table.table + own_head * table.head
    divided = held.layers * layer
    experts = layer_experts = None
    if held.mixed is not None:
        layer = table.attention_params + np.where(
            held.mixed < held.layers, max(table.dense_params, table.shared_params), table.shared_params
        )
        divided += held.mixed * (table.shared_params - table.dense_params)
        whole += held.mixed * (table.whole_mixed - table.whole)
        layer_experts = table.expert_params / (tensor * rows.layouts.expert)
        experts = held.mixed * layer_experts
    aside = words / tensor + whole
    return Elements(
        dense=divided / tensor + held.layers * repeated + aside,
        layer=layer / tensor + max(table.whole, table.whole_mixed) + repeated,
        matrix=table.largest / tensor,
        vocabulary=np.maximum(held.embedding, held.head) * (table.table / tensor),
        aside=aside,
        experts=experts,
        layer_experts=layer_experts,
    )


def gradient_bytes(rows: LayoutRows) -> Floats | int:
    """Return the bytes of one gradient element while gradients of micro-batches accumulate."""
    framework, recipe = rows.framework, rows.recipe
    if framework.accumulators and rows.layouts.precision == "bf16-mixed":
        return recipe.gradient + 4
    if not framework.whole_in_pipelines:
        return 4 if framework.main_gradients and recipe.master else recipe.gradient
    return np.where(rows.layouts.pipeline > 1, max(4, recipe.gradient), recipe.gradient)


def _whole(rows: LayoutRows, count: Floats, aside: Floats, factors: Floats) -> ModelStates:
    """Return the states of `count` parameters, without sharding by ZeRO."""
    recipe = rows.recipe
    kept = optimizer_bytes(rows.layouts.optimizer.states, recipe, count, aside=aside, factors=factors)
    stored = recipe.parameter * count
    if recipe.narrowed:
        stored = stored - recipe.narrowed * (count - aside)
    return ModelStates(stored, gradient_bytes(rows) * count, kept)


def _partitioned(rows: LayoutRows, whole: ModelStates, ranks: Floats) -> ModelStates:
    """Return the states after sharding by ZeRO over `ranks` ranks."""
    zero = rows.layouts.zero
    parameters = zero >= 3 - rows.casts
    if rows.has_units:
        parameters |= rows.gathers_units
    return partitioned(whole, stage=zero, ranks=ranks, gradients=rows.shards_gradients, parameters=parameters)


def _dense_states(rows: LayoutRows, own: Elements, held: Holding) -> ModelStates:
    """Return the states of all parameters except routed experts, after sharding by ZeRO."""
    factors = held.layers * _factors(rows, mixed=False) / rows.shape.tensor
    whole = _whole(rows, own.dense, own.aside, factors)
    return _partitioned(rows, whole, rows.zero_ranks)


def _expert_states(rows: LayoutRows, own: Elements, held: Holding) -> ModelStates:
    """Return the states of routed experts, after sharding by ZeRO."""
    if own.experts is None or held.mixed is None:
        return NO_STATES
    factors = held.mixed * _factors(rows, mixed=True) / (rows.shape.tensor * rows.layouts.expert)
    whole = _whole(rows, own.experts, NONE, factors)
    return _partitioned(rows, whole, rows.expert_ranks)


def _factors(rows: LayoutRows, *, mixed: bool) -> int:
    return rows.weights.factors(mixed=mixed, experts=rows.model.mixture.experts if rows.model.mixture else 0)


def _copies(rows: LayoutRows, own: Elements) -> Floats:
    """Return the bytes of low-precision copies of weights, without those gathered by layer.

    FSDP2 without resharding (ZeRO 2) gathers all weights in 16 bits; all other copies are of matrices only.
    """
    recipe, zero = rows.recipe, rows.layouts.zero
    if not recipe.copies:
        return NONE
    experts = own.experts if own.experts is not None else 0
    copied = np.where(zero == 2, own.dense, own.matrices.dense) if rows.casts else own.matrices.dense
    are_kept = np.where(rows.gathers_units, not rows.casts, zero < 3) if rows.has_units else zero < 3
    return np.asarray(recipe.copies * (copied + experts) * are_kept)


def _gathered_weights(rows: LayoutRows, own: Elements) -> Floats:
    """Return the bytes of weights gathered from other ranks' shards, in the precision in which they are gathered."""
    recipe, prefetched = rows.recipe, rows.framework.prefetched
    if rows.casts:
        return _gathered(rows, own, recipe.copies, prefetched, 3)
    whole = _gathered(rows, own, recipe.parameter, prefetched, 3)
    return whole + _gathered(rows, own.matrices, recipe.copies - recipe.narrowed, prefetched, 3)


def bucket_bytes(rows: LayoutRows) -> int:
    """Return the bytes of one gradient element while it is reduced.

    FSDP2 copies 16-bit gradients into a float32 buffer for the reduction (``foreach_reduce`` with ``reduce_dtype``).
    """
    return rows.recipe.copies + rows.recipe.gradient if rows.casts else rows.recipe.gradient


def _early(  # noqa: PLR0917
    rows: LayoutRows, own: Elements, held: Holding, gradients: Floats, copies: Floats, more_copies: Floats
) -> Early | None:
    """Return the memory before all gradients exist; `gradients` and `copies` are those of the whole rank.

    Autocast's copies stay in its cache during the forward pass, and exist in a layer's backward pass while the layer
    needs them; FSDP2 frees gathered weights after a layer's backward pass. Other copies are kept.
    """
    framework, layouts, recipe = rows.framework, rows.layouts, rows.recipe
    casts = recipe.copies > 0 and not recipe.master
    is_early = framework.keeps_gradients_from or framework.float32_update or casts
    if not is_early and not rows.has_units:
        return None
    keeps = layouts.zero >= framework.keeps_gradients_from
    if framework.keeps_replicas_gradients:
        keeps |= ((layouts.zero < 2) | (rows.zero_ranks == 1)) & (layouts.data * layouts.context > 1)
    if framework.accumulators and layouts.precision == "bf16-mixed":
        keeps = np.ones_like(keeps)
    layer = own.layer if own.layer_experts is None else own.layer + own.layer_experts
    count = own.dense if own.experts is None else own.dense + own.experts
    share = np.minimum(1.0, (layer + held.head * own.vocabulary) / count)
    sharing = 1.0 if framework.whole_logits else rows.shape.tensor
    begin = end = update = copies
    if casts:
        update, end = NONE, np.minimum(copies, recipe.copies * layer)
        is_freed = (layouts.recompute == FULL) & (layouts.recompute_layers == 0)
        if rows.casts:
            is_freed &= layouts.zero != 2
        begin = np.where(is_freed, end, copies)
        others = np.where(is_freed, 0.0, more_copies)
        begin, end = begin + others, end + others
    accumulates = keeps | (rows.pipeline.microbatches > held.in_flight)
    words = held.head * own.vocabulary
    arriving = NONE
    if framework.casts:
        largest = own.matrix if own.layer_experts is None else np.maximum(own.matrix, own.layer_experts)
        arriving = recipe.gradient * (words + largest)
        if rows.casts:  # a unit's gradients are in 16 bits until its backward pass ends
            arriving = np.where(layouts.zero >= 2, recipe.copies * (words + layer), arriving)
        arriving = arriving * accumulates
    return Early(
        accumulates=accumulates,
        layers=held.layers,
        gradients=gradients * share,
        logits_later=held.head
        * logit_bytes(framework, recipe)[1]
        * rows.model.vocab
        * rows.shape.tokens
        / sharing,
        arriving=arriving,
        in_forward=forward_bytes(rows) if framework.casts else None,
        copies_head=recipe.copies * words * (casts and not rows.casts),
        copies_begin=begin,
        copies_end=end,
        copies_update=update,
    )


def _bucket(rows: LayoutRows, own: Elements, copied: Floats) -> Floats:
    """Return the bytes of gradients to be reduced: a layer's gradients, flat buffers, or copies of all gradients."""
    framework, width = rows.framework, bucket_bytes(rows)
    if not framework.bucket_elements:
        return _gathered(rows, own, width, 0, 2) + copied
    largest = np.maximum(own.matrix, own.vocabulary)
    alone = largest * (largest > framework.bucket_elements)  # reduced from where it is
    return np.asarray((width * alone + _buffers(rows)) * (rows.borrowed[2][0] > 0))


def _buffers(rows: LayoutRows) -> Floats:
    """Return the bytes of the flat buffers from which gradients are reduced."""
    count = np.where(rows.layouts.zero >= 3, rows.framework.buckets, 1)
    return np.asarray(rows.recipe.gradient * count * rows.framework.bucket_elements)


def _copied(rows: LayoutRows, own: Elements) -> Floats:
    """Return the bytes of the copies of gradients in which replicas without ZeRO reduce them."""
    if not rows.framework.copies_to_reduce:
        return NONE
    count = own.dense if own.experts is None else own.dense + own.experts
    return np.asarray(gradient_bytes(rows) * count * ((rows.layouts.zero == 0) & (rows.zero_ranks > 1)))


def _gathered(rows: LayoutRows, own: Elements, width: int, prefetched: int, stage: int) -> Floats:
    """Return the bytes of other ranks' shards that a rank holds temporarily: gathered parameters, unreduced gradients.

    They are limited to the bytes that the rank would hold without ZeRO. A rank's own part of a layer is not counted
    again, except for matrices that stay alive for reuse, because these are gathered into separate tensors.

    Args:
        rows: The layouts.
        own: Numbers of parameters on the rank.
        width: Bytes of one element.
        prefetched: Number of layers gathered in advance, in addition to the running one.
        stage: 3 for parameters, 2 for gradients.
    """
    if not width:
        return NONE
    part, experts = rows.borrowed[stage]
    framework = rows.framework
    if stage == 3 and framework.live_elements:
        running = np.maximum(np.maximum(own.matrix, own.vocabulary), framework.live_elements)
        if framework.holds_gathered:
            running = np.where(rows.layouts.recompute == FULL, running, own.dense)
        part = (part > 0).astype(float)  # the gathered matrices are beside the rank's shards of them
    else:
        running = np.maximum(own.layer, own.vocabulary) + prefetched * own.layer
    sizes = np.minimum(running, own.dense) * part
    if own.experts is not None and own.layer_experts is not None:
        sizes += np.minimum((1 + prefetched) * own.layer_experts, own.experts) * experts
    return width * sizes


SUB_GROUP = 1e9
"""Number of parameters that DeepSpeed's ZeRO-3 updates at once (``sub_group_size``)."""


def _update(rows: LayoutRows, own: Elements) -> Floats:
    """Return the bytes of temporary gradients, and of buffers, in the update of a rank's parameters."""
    framework, layouts, recipe = rows.framework, rows.layouts, rows.recipe
    accumulates = framework.accumulators and layouts.precision == "bf16-mixed"
    if not framework.float32_update or accumulates or not recipe.master:
        return NONE
    is_on = layouts.zero > 0
    updated = own.dense / np.where(is_on, rows.zero_ranks, 1.0)
    if own.experts is not None:
        updated = updated + own.experts / np.where(is_on, rows.expert_ranks, 1.0)
    updated = np.where(layouts.zero >= 3, np.minimum(updated, SUB_GROUP), updated)
    temporary = (4 + recipe.gradient * is_on) * updated * ~OFFLOADS_OPTIMIZER[layouts.offload]
    if framework.keeps_buckets:
        stay = (layouts.zero >= 3) & (rows.borrowed[2][0] > 0) & (temporary > 0)
        temporary = temporary + _buffers(rows) * stay
    return np.asarray(temporary)


def _saved(rows: LayoutRows, held: Holding) -> tuple[Floats, Floats]:
    """Return the bytes that the rank's layers save for one micro-batch, and the temporary bytes of one layer."""
    if rows.recomputes_in_part:
        return _saved_in_part(rows, held)
    if held.mixed is None:
        return held.layers * rows.dense.kept, rows.in_dense + rows.dense.again
    once = (held.layers - held.mixed) * rows.dense.kept + held.mixed * rows.mixed.kept
    in_dense = (rows.in_dense + rows.dense.again) * (held.mixed < held.layers)
    return once, np.maximum(in_dense, (rows.in_mixed + rows.mixed.again) * (held.mixed > 0))


def _saved_in_part(rows: LayoutRows, held: Holding) -> tuple[Floats, Floats]:
    """Return the results of `_saved` if only the first layers of each stage are recomputed.

    The backward pass frees the saved activations of the other layers before it reaches the recomputed ones.
    """
    mixed = NONE if held.mixed is None else held.mixed
    again = recomputed_by_kind(held.layers - mixed, mixed, rows.layouts.most_recomputed)
    left_dense, left_mixed = held.layers - mixed - again[0], mixed - again[1]
    saved_whole = left_dense * rows.dense.whole + left_mixed * rows.mixed.whole
    once = again[0] * rows.dense.kept + again[1] * rows.mixed.kept + saved_whole
    freed = saved_whole / rows.pipeline.chunks
    in_dense = (rows.in_dense + np.maximum(rows.dense.again - freed, 0.0)) * (mixed < held.layers)
    in_mixed = (rows.in_mixed + np.maximum(rows.mixed.again - freed, 0.0)) * (mixed > 0)
    return once, np.maximum(in_dense, in_mixed)


def _running(rows: LayoutRows, held: Holding, once: Floats) -> Floats:
    """Return the saved bytes of the running layer and of the prefetched ones, which stay on the device.

    Layers are of average size. If only some layers are recomputed, those without recomputation run consecutively and
    save more.
    """
    count = 1 + rows.framework.prefetched
    average = once * np.minimum(count / held.layers, held.in_flight)
    if not rows.recomputes_in_part:
        return average
    most = rows.layouts.most_recomputed
    whole = np.minimum(count, np.maximum(held.layers - most, 0.0))
    mixed = (NONE if held.mixed is None else held.mixed) / held.layers
    of_whole, of_kept = (
        (1 - mixed) * dense + mixed * routed
        for dense, routed in ((rows.dense.whole, rows.mixed.whole), (rows.dense.kept, rows.mixed.kept))
    )
    running = whole * of_whole + (count - whole) * of_kept
    return np.where(most > 0, np.minimum(running, once * held.in_flight), average)


def _embedding_mask(rows: LayoutRows, held: Holding) -> Floats:
    """Return the bytes of the mask of the dropout after the embedding (Korthikanti et al. 2022, section 4.3)."""
    if not rows.framework.dropout:
        return NONE
    tokens = rows.shape.tokens / rows.shape.divided
    return held.embedding * held.in_flight * (MASK_BYTES * rows.model.hidden) * tokens


def _outputs(rows: LayoutRows, own: Elements, held: Holding, once: Floats) -> tuple[Floats, Floats]:
    """Return the bytes of the stage's outputs that a pipeline keeps, and those gathered for one backward pass."""
    framework, recipe = rows.framework, rows.recipe
    if framework.whole_in_pipelines:
        return torch_pipelines.outputs(rows, own, held, once) if rows.has_torch else (NONE, NONE)
    if not framework.keeps_outputs:
        return NONE, NONE
    is_sent = (rows.pipeline.ranks > 1) & (held.head == 0)
    one = is_sent * recipe.activation * rows.model.hidden * rows.shape.tokens
    if not framework.shards_outputs:
        return held.in_flight * one, NONE
    return held.in_flight * one / rows.shape.tensor, one * (rows.shape.tensor > 1)


def _placeholders(rows: LayoutRows, held: Holding) -> Floats:
    """Return the bytes of placeholder gradients on a rank."""
    table, recipe = rows.weights, rows.recipe
    if not rows.framework.reused_gradient:
        return NONE
    layers: Floats | float = _reused_gradients(table, recipe, dense=True, mixed=False)
    if held.mixed is not None:
        both = _reused_gradients(table, recipe, dense=True, mixed=True)
        routed = _reused_gradients(table, recipe, dense=False, mixed=True)
        layers = np.where(held.mixed > 0, np.where(held.mixed < held.layers, both, routed), layers)
    return (layers + held.head * (recipe.activation * table.head)) / rows.shape.tensor


def _reused_gradients(table: WeightShapes, recipe: ElementBytes, *, dense: bool, mixed: bool) -> float:
    """Return the bytes of one placeholder gradient per distinct weight shape, without tensor parallelism.

    If a matrix product adds the gradient directly to ``main_grad``, TransformerEngine 2.x gives autograd a placeholder
    of the weight's shape, which is kept and reused for all weights of that shape (`get_dummy_wgrad`).

    Args:
        table: The model's weights.
        recipe: Bytes per element.
        dense: Whether the rank has layers without experts.
        mixed: Whether the rank has layers with experts.
    """
    shapes = set(table.attention)
    shapes |= set(table.dense) if dense else set()
    shapes |= {*table.shared, *table.expert} if mixed else set()
    return float(recipe.activation * sum(rows * columns for rows, columns in shapes))
