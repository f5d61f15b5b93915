"""What the rules ask of each layout and does not depend on the pipeline stage, worked out once for a table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import activations as saved
from shardscope.analytic.memory import buffers
from shardscope.analytic.memory.columns import Floats, Pipeline, pipeline_of
from shardscope.analytic.memory.frameworks import Framework
from shardscope.analytic.memory.offload import OFFLOADS_STATES
from shardscope.analytic.memory.states import Recipe, known_recipe
from shardscope.analytic.memory.weights import Weights, weights
from shardscope.spec.model import Transformer


class Shape(NamedTuple):
    """Degrees and sizes as floats."""

    tokens: Floats
    """Of a micro-batch on one context rank."""
    span: Floats
    """Tokens that one looks at on one context rank."""
    tensor: Floats
    divided: Floats
    """Tensor ranks that share what tensor parallelism leaves whole."""


class LayerSaved(NamedTuple):
    """Bytes of one layer and one micro-batch."""

    kept: Floats
    again: Floats
    """That recomputation brings back while the layer runs backward."""


class Rows(NamedTuple):
    """A table of layouts for one model under one framework."""

    model: Transformer
    layouts: Layouts
    framework: Framework
    recipe: Recipe
    weights: Weights
    pipeline: Pipeline
    shape: Shape
    zero_ranks: Floats
    """That ZeRO partitions over."""
    expert_ranks: Floats
    """That ZeRO partitions experts over: those that hold the same ones."""
    borrowed: dict[int, tuple[Floats, Floats]]
    """By ZeRO stage from which a layer that runs is whole: the share of it that is not the rank's own; of experts."""
    dense: LayerSaved
    mixed: LayerSaved
    in_dense: Floats
    """Working bytes while a layer runs."""
    in_mixed: Floats
    at_loss: Floats


def rows_of(model: Transformer, layouts: Layouts, framework: Framework) -> Rows:
    """Everything that all stages share."""
    recipe, shape = known_recipe(layouts.precision), _shape(model, layouts)
    zero_ranks = layouts.shard.astype(float)
    dense = _layer(model, layouts, shape, recipe, framework, mixed=False)
    in_dense = _working(model, layouts, shape, recipe)
    mixed, in_mixed, expert_ranks = dense, in_dense, zero_ranks
    if model.mixture:
        mixed = _layer(model, layouts, shape, recipe, framework, mixed=True)
        in_mixed = buffers.in_a_mixture(
            model, model.mixture, recipe, framework, expert=layouts.expert, tokens=shape.tokens,
            tensor=shape.tensor, divided=shape.divided,
        )  # fmt: skip
        expert_ranks = np.maximum(1.0, zero_ranks / layouts.expert)
    return Rows(
        model=model,
        layouts=layouts,
        framework=framework,
        recipe=recipe,
        weights=weights(model),
        pipeline=pipeline_of(layouts, model.layers),
        shape=shape,
        zero_ranks=zero_ranks,
        expert_ranks=expert_ranks,
        borrowed={stage: _borrowed(layouts, stage, zero_ranks, expert_ranks) for stage in (2, 3)},
        dense=dense,
        mixed=mixed,
        in_dense=in_dense,
        in_mixed=in_mixed,
        at_loss=buffers.at_the_loss(
            model, recipe, framework, tokens=shape.tokens, tensor=shape.tensor, divided=shape.divided
        ),
    )


def _borrowed(
    layouts: Layouts, stage: int, zero_ranks: Floats, expert_ranks: Floats
) -> tuple[Floats, Floats]:
    """Where all states are offloaded, the layers that run are whole on the device whatever the stage."""
    away, is_on = OFFLOADS_STATES[layouts.offload], layouts.zero >= stage
    dense = np.where(away, 1.0, is_on * (1 - 1 / zero_ranks))
    if expert_ranks is zero_ranks:
        return dense, dense
    return dense, np.where(away, 1.0, is_on * (1 - 1 / expert_ranks))


def _shape(model: Transformer, layouts: Layouts) -> Shape:
    tensor = layouts.tensor.astype(float)
    span = model.seq / layouts.context
    divided = np.where(layouts.sequence_parallel, tensor, 1.0)
    return Shape(tokens=layouts.micro_batch * span, span=span, tensor=tensor, divided=divided)


def _working(model: Transformer, layouts: Layouts, shape: Shape, recipe: Recipe) -> Floats:
    layer = buffers.in_a_layer(model, recipe, tokens=shape.tokens, tensor=shape.tensor, divided=shape.divided)
    if layouts.flash_attention:
        return layer
    scores = buffers.in_the_attention(
        model, recipe, tokens=shape.tokens, span=shape.span, tensor=shape.tensor
    )
    return np.maximum(layer, scores)


def _layer(
    model: Transformer, layouts: Layouts, shape: Shape, recipe: Recipe, framework: Framework, *, mixed: bool
) -> LayerSaved:
    part = saved.outside_core(model, recipe, framework, mixed=mixed)
    outside = saved.per_layer(part, (0.0, 0.0), **shape._asdict(), key_heads=model.kv_heads)
    core = saved.core(
        model, recipe, framework, flash=layouts.flash_attention, context=layouts.context, **shape._asdict()
    )
    full = layouts.recompute == saved.FULL
    kept_core = core if layouts.flash_attention else core * (layouts.recompute != saved.SELECTIVE)
    entry = saved.entry(model, recipe, tokens=shape.tokens, divided=shape.divided)
    whole = outside + core
    kept = np.where(full, entry, outside + kept_core)
    return LayerSaved(kept, whole - kept)
