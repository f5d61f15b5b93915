"""Memory that a rank of one of torch's pipelines (`torch.distributed.pipelining`) holds beyond its layers' memory.

It is formulated for tables of layouts whose `LayoutRows.has_torch` is true; see `analytic.memory.pipelines` for traced
modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardscope.analytic.memory.activations import FLOAT32_BYTES, FULL
from shardscope.analytic.memory.rows import (
    NONE,
    Floats,
    Holding,
    LayoutRows,
    PipelineColumns,
    splits_backward,
)

if TYPE_CHECKING:
    from shardscope.analytic.memory.stage import Elements


def outputs(rows: LayoutRows, own: Elements, held: Holding, once: Floats) -> tuple[Floats, Floats]:
    """Return the bytes that torch's pipelines keep beyond layers' activations: throughout, and during a backward pass.

    These are the outputs of stages, except that of the running micro-batch, which its gradient replaces. At the end of
    the model, these are the final norm's input and output, the logits, and the loss's log-probabilities in float32,
    under autocast also in 16 bits. Ranks with several stages hold these only for one micro-batch, or for two if
    gradients of weights are delayed. The pass for inputs frees the logits and log-probabilities of a micro-batch.
    """
    recipe, chunks, count = rows.recipe, rows.pipeline.chunks, held.in_flight * rows.pipeline.chunks
    tokens, one, is_autocast = rows.shape.tokens, _boundary(rows), _is_autocast(rows)
    logits = rows.model.vocab * tokens / rows.shape.tensor
    per_logit = _bytes_per_logit(rows)
    weights = recipe.copies * own.vocabulary * is_autocast
    normed = recipe.activation * rows.model.hidden * tokens / rows.shape.divided
    at_end = one + normed + per_logit * logits + weights
    output = np.where(held.head * (chunks == 1) > 0, at_end, one)
    running = held.head * recipe.activation * logits * (not rows.casts)
    kept = rows.in_torch * ((count - 1) * output + running)
    splits = splits_backward(rows.layouts)
    if not splits.any():
        return kept, NONE
    others, in_backward = _delayed(rows, own, held, one, once)
    has_two = held.head * (rows.pipeline.interleaved & splits)
    scores = recipe.activation * logits + one
    kept += has_two * (at_end + scores - per_logit * logits)
    return kept + others, in_backward + has_two * scores


AGAIN_AT_ONCE = 4
"""Number of copies of a layer's recomputed activations that torch holds while it computes each weight's gradient
separately, repeating the layer for each, as it does by itself; in a job, ranks recompute a layer once for all weights.
Fitted to measured peaks of zero-bubble schedules, to within 10 %."""


def _delayed(
    rows: LayoutRows, own: Elements, held: Holding, stream: Floats, once: Floats
) -> tuple[Floats, Floats]:
    """Return the bytes that split backward passes keep until they compute gradients of weights.

    These are the output gradients of operations with weights. The first value is for waiting micro-batches, the second
    for the running micro-batch, including its recomputed activations.
    """
    model, recipe, tokens, tensor = rows.model, rows.recipe, rows.shape.tokens, rows.shape.tensor
    chunks, act, share = rows.pipeline.chunks, recipe.activation, held.layers / rows.pipeline.chunks
    width = (model.heads + 2 * model.kv_heads) * model.head_size + (1 + model.gated) * model.ffn
    around = 2 * act * model.hidden * tokens / rows.shape.divided + model.norms_per_layer * stream
    head = held.head * (act * model.vocab * tokens / tensor + stream) * (chunks == 1)
    one = share * (act * tokens * width / tensor + around) + head
    count = splits_backward(rows.layouts) * _num_delayed(rows.pipeline, held, (once / chunks + stream) / one)
    copies = recipe.copies * own.matrices.dense / chunks * _is_autocast(rows)
    again = AGAIN_AT_ONCE * (share * rows.dense.again + copies) - rows.dense.again
    is_full = (rows.layouts.recompute == FULL) & (rows.layouts.recompute_layers == 0) & (count > 0)
    freed = held.head * _bytes_per_logit(rows) * model.vocab * tokens / tensor * (chunks == 1)
    return np.maximum(count - 1, 0.0) * (one - freed), np.minimum(count, 1.0) * one + again * is_full


def _num_delayed(pipeline: PipelineColumns, held: Holding, saved: Floats) -> Floats:
    """Return the number of micro-batches on a stage whose gradients of weights are delayed at the rank's peak.

    This is for schedules that split the backward pass. The first stage delays none. Ranks with one stage delay more
    micro-batches, the later they are in the pipeline. In V-shaped schedules, ranks delay at most two; but with as many
    micro-batches in flight as ZBV, later ranks may peak while the pipeline drains, with fewer micro-batches in flight.
    DualPipeV delays none at its peak.

    Args:
        pipeline: Properties of the pipelines.
        held: Layers and activations that the rank holds.
        saved: Activations that a stage saves for one micro-batch, relative to the gradients that are kept for it.
    """
    place, is_v = pipeline.ranks - held.left, pipeline.rounded
    draining = np.maximum(2 * place + 1 - held.left * saved, 1.0)
    count = np.where(is_v & (pipeline.of_all == 1), draining, pipeline.of_all * place + 1)
    count = np.where(is_v & (pipeline.of_all < 1), np.minimum(count, 2.0), count)
    is_dual = (pipeline.head_at == 0) & ~is_v
    has_any = ~is_dual & ((held.embedding == 0) | (pipeline.chunks > 1))
    return np.asarray(np.minimum(count, held.in_flight * pipeline.chunks) * has_any)


def _bytes_per_logit(rows: LayoutRows) -> float:
    """Return the bytes of a logit and of its log-probability, which the loss saves."""
    return rows.recipe.activation * (1 + _is_autocast(rows)) + FLOAT32_BYTES


def _is_autocast(rows: LayoutRows) -> bool:
    """Return whether autocast alone casts weights, in all layouts of the table."""
    return rows.recipe.copies > 0 and not rows.recipe.master and not rows.casts


def _boundary(rows: LayoutRows) -> Floats:
    """Return the bytes of the activations that a stage sends to the next stage for one micro-batch."""
    width = rows.recipe.activation + rows.wider
    return np.asarray(width * rows.model.hidden * rows.shape.tokens / rows.shape.divided)


def inputs(rows: LayoutRows, held: Holding) -> Floats:
    """Return the bytes of stage inputs that the first layers would save, but that torch holds in receive buffers."""
    stages = rows.pipeline.chunks - held.embedding
    return np.asarray(rows.in_torch * held.in_flight * stages * _boundary(rows))


def messages(rows: LayoutRows, held: Holding) -> Floats:
    """Return the bytes of a rank's messages in torch's pipelines: all messages received in a step, and one being sent.

    Each stage has a buffer for every input and every gradient of an output in a step.
    """
    pipeline = rows.pipeline
    received = pipeline.microbatches * (2 * pipeline.chunks - held.embedding - held.head)
    sent = pipeline.chunks > held.embedding
    return np.asarray(rows.in_torch * _boundary(rows) * (received + sent))


def copies_in_flight(rows: LayoutRows, held: Holding, copies: Floats) -> Floats:
    """Return the bytes of the copies that autocast makes for each micro-batch, in addition to one micro-batch's copies.

    With recomputation, only the running stage has copies, so the result is negative for ranks with several stages.
    """
    layouts = rows.layouts
    if rows.recipe.master:
        return NONE
    is_freed = (layouts.recompute == FULL) & (layouts.recompute_layers == 0)
    more = np.where(is_freed, 1 / rows.pipeline.chunks, held.in_flight) - 1
    return np.asarray(copies * more * rows.in_torch * ~(rows.casts & (layouts.zero >= 2)))
