"""What is known of each layout before any of its stages is: weights, pipeline, sizes; worked out once for a table."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import activations as saved
from shardscope.analytic.memory.frameworks import FRAMEWORKS, Framework
from shardscope.analytic.memory.offload import OFFLOADS_STATES
from shardscope.analytic.memory.states import Recipe, known_recipe
from shardscope.analytic.schedules.closed import columns
from shardscope.errors import unknown_name
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


def rows_of(model: Transformer, layouts: Layouts, framework: str | Framework) -> Rows:
    """Everything that all stages share, by a framework's habits or those of the one of that name."""
    framework = _known_framework(framework)
    recipe, shape = known_recipe(layouts.precision), _shape(model, layouts)
    zero_ranks = layouts.shard.astype(float)
    dense = _layer(model, layouts, shape, recipe, framework, mixed=False)
    in_dense = _working(model, layouts, shape, recipe)
    mixed, in_mixed, expert_ranks = dense, in_dense, zero_ranks
    if model.mixture:
        mixed = _layer(model, layouts, shape, recipe, framework, mixed=True)
        in_mixed = saved.in_a_mixture(
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
        at_loss=saved.at_the_loss(
            model, recipe, framework, tokens=shape.tokens, tensor=shape.tensor, divided=shape.divided
        ),
    )


def _known_framework(framework: str | Framework) -> Framework:
    """The framework of that name; raises `SpecError` where there is none."""
    if isinstance(framework, Framework):
        return framework
    if framework not in FRAMEWORKS:
        raise unknown_name("framework", framework, FRAMEWORKS)
    return FRAMEWORKS[framework]


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
    layer = saved.in_a_layer(model, recipe, tokens=shape.tokens, tensor=shape.tensor, divided=shape.divided)
    if layouts.flash_attention:
        return layer
    scores = saved.in_the_attention(model, recipe, tokens=shape.tokens, span=shape.span, tensor=shape.tensor)
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


Floats = npt.NDArray[np.float64]


class Pipeline(NamedTuple):
    """Of each layout, what does not depend on the place in its pipeline."""

    ranks: Floats
    microbatches: Floats
    chunks: Floats
    """Parts of the model on each rank that are not next to each other."""
    interleaved: npt.NDArray[np.bool_]
    rounded: npt.NDArray[np.bool_]
    """Whether the schedule is a V of building blocks, which hold whole micro-batches."""
    in_thirds: npt.NDArray[np.bool_]
    """Whether every third rank holds one less where a third of the ranks leaves two thirds over."""
    head_at: Floats
    """Place of the output projection: a V-shaped schedule brings it back to the first rank."""
    layers: Floats
    """On each rank."""
    rest: Floats
    """Layers that are left over: one more for each of the first ranks."""
    of_left: Floats
    of_all: Floats
    constant: Floats


class Holding(NamedTuple):
    """Of one pipeline rank."""

    layers: Floats
    mixed: Floats | None
    """Of the layers, those with experts; None where the model has none."""
    embedding: Floats
    """1 on the rank that holds it, else 0."""
    head: Floats
    """1 on the rank that holds it, else 0."""
    in_flight: Floats
    """Micro-batches whose activations it keeps, in units of the whole rank."""


def pipeline_of(layouts: Layouts, layers: int) -> Pipeline:
    """The pipelines of the layouts, for a model's number of layers."""
    ranks, schedule = layouts.pipeline.astype(float), layouts.schedule
    known = columns()
    folded, interleaved = known.v_shaped[schedule], known.leaves_stages[schedule]
    own = np.floor(layers / ranks)
    return Pipeline(
        ranks=ranks,
        microbatches=layouts.num_micro_batches.astype(float),
        chunks=np.where(interleaved, layouts.virtual_stages, 1.0 + folded),
        interleaved=interleaved & (layouts.virtual_stages > 1),
        rounded=known.is_rounded[schedule],
        in_thirds=known.in_thirds[schedule],
        head_at=(ranks - 1) * ~folded,
        layers=own,
        rest=layers - own * ranks,
        of_left=known.of_left[schedule],
        of_all=known.of_all[schedule],
        constant=known.constant[schedule],
    )


def held_by(place: Floats, pipeline: Pipeline, *, dense: int | None) -> Holding:
    """What the rank at `place` holds.

    Args:
        place: In the pipeline, from 0, one for each layout.
        pipeline: The layouts' pipelines.
        dense: How many of the first layers have no experts; None where none has.
    """
    own = pipeline.layers + (place < pipeline.rest)
    mixed = None
    if dense is not None:
        chunk = own / pipeline.chunks
        mixed = own - np.minimum(np.maximum(dense - place * chunk, 0.0), chunk)
    return Holding(
        layers=own,
        mixed=mixed,
        embedding=(place == 0).astype(float),
        head=(place == pipeline.head_at).astype(float),
        in_flight=_in_flight(place, pipeline),
    )


def _in_flight(place: Floats, pipeline: Pipeline) -> Floats:
    """Micro-batches in flight on the rank at `place`, in units of the whole rank.

    Interleaved: Korthikanti et al. 2022, section 4.2.3, p (1 + (p-1)/(pv)) on the first rank.
    """
    left, chunks = pipeline.ranks - place, pipeline.chunks
    held = pipeline.of_left * left + pipeline.of_all * pipeline.ranks + pipeline.constant
    if pipeline.interleaved.any():
        whole = (
            (chunks - 1) * pipeline.ranks
            + (2 * left - 1) * pipeline.of_left
            + pipeline.ranks * pipeline.of_all
        )
        held = np.where(pipeline.interleaved, whole / chunks, held)
    if pipeline.rounded.any():
        whole = np.floor(held + 1e-9)
        some = np.flatnonzero(pipeline.in_thirds)  # a remainder takes ten times an addition
        whole[some] -= (pipeline.ranks[some] % 3 == 2) & (np.broadcast_to(place, whole.shape)[some] % 3 == 0)
        held = np.where(pipeline.rounded, np.minimum(whole, (pipeline.microbatches + place + 1) / 2), held)
    return np.minimum(held, pipeline.microbatches)


Matrix = tuple[int, int]
"""Inputs and outputs of a linear layer."""


class Weights(NamedTuple):
    """Elements; of one layer unless it says otherwise."""

    attention: tuple[Matrix, ...]
    """Linear layers that tensor parallelism divides."""
    dense: tuple[Matrix, ...]
    """Of the feed-forward layer, in layers without a mixture."""
    shared: tuple[Matrix, ...]
    """Of the experts that every token visits."""
    expert: tuple[Matrix, ...]
    """Of one routed expert."""
    expert_params: int
    """Of all routed experts."""
    key_params: int
    """Of `attention`, those that make keys and values; 0 with latent attention, whose heads are all divided."""
    key_heads: int
    """Heads of keys and values: tensor ranks beyond repeat them, as Megatron-Core does."""
    whole: int
    """On every rank: norms, biases, narrow projections."""
    whole_mixed: int
    """The same in a layer with experts, its router included."""
    table: int
    """Of the words, in the whole model."""
    head: int
    """Of the output projection, in the whole model; where it is tied, the table's."""
    before: int
    """In the whole model, before the first layer, on every tensor rank: positions."""
    behind: int
    """In the whole model, behind the last layer, on every tensor rank: the final norm."""
    tied: bool

    @property
    def attention_params(self) -> int:
        """Divided by the tensor degree."""
        return _size(self.attention)

    @property
    def dense_params(self) -> int:
        """Divided by the tensor degree."""
        return _size(self.dense)

    @property
    def shared_params(self) -> int:
        """Divided by the tensor degree."""
        return _size(self.shared)

    def repeated_keys(self, tensor: Floats) -> Floats:
        """Elements of a layer that a rank holds besides its t-th part, as there are more ranks than heads of keys."""
        return self.key_params * (1 / np.minimum(tensor, self.key_heads) - 1 / tensor)

    def factors(self, *, mixed: bool, experts: int) -> int:
        """Rows and columns of one layer's matrices: of its experts, or of all others."""
        if mixed:
            return experts * sum(map(sum, self.expert))
        return sum(map(sum, (*self.attention, *(self.shared or self.dense))))


def _size(matrices: tuple[Matrix, ...]) -> int:
    return sum(rows * columns for rows, columns in matrices)


@lru_cache(maxsize=256)
def weights(model: Transformer) -> Weights:
    """The table of a model."""
    mixture, attention = model.mixture, _attention(model)
    dense = _feed_forward(model, model.ffn)
    shared = _feed_forward(model, mixture.shared_ffn) if mixture and mixture.shared_ffn else ()
    mixed = _size(attention) + _size(shared) + model.expert_params
    table = model.vocab * model.hidden
    own_head = 0 if model.tied or not model.lm_head else table
    return Weights(
        attention=attention,
        dense=dense,
        shared=shared,
        expert=_feed_forward(model, mixture.ffn) if mixture else (),
        expert_params=model.expert_params,
        key_params=0 if model.latent else 2 * model.kv_heads * model.head_size * model.hidden,
        key_heads=model.kv_heads,
        whole=model.layer_params - _size(attention) - _size(dense),
        whole_mixed=model.mixture_layer_params - mixed if mixture else 0,
        table=table,
        head=table if model.lm_head else 0,
        before=model.embedding_params - table,
        behind=model.final_norm_params + model.head_params - own_head,
        tied=model.tied,
    )


def _feed_forward(model: Transformer, inner: int) -> tuple[Matrix, ...]:
    """Gate and input as one matrix, as Megatron and vLLM keep them, and the way back."""
    return (model.hidden, (1 + model.gated) * inner), (inner, model.hidden)


def _attention(model: Transformer) -> tuple[Matrix, ...]:
    """The matrices that are divided: all of them, or with latent attention those that widen."""
    latent, hidden, heads = model.latent, model.hidden, model.heads
    if latent is None:
        width = heads * model.head_size
        return (hidden, width + 2 * model.kv_heads * model.head_size), (width, hidden)
    query = latent.nope_size + latent.rope_size
    up = (latent.kv_rank, heads * (latent.nope_size + latent.value_size))
    return (latent.query_rank or hidden, heads * query), up, (heads * latent.value_size, hidden)
