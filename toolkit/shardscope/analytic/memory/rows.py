"""Values of each layout that are the same for all its stages: weights, pipeline, sizes; computed once per table."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import activations as saved
from shardscope.analytic.memory.frameworks import FRAMEWORKS, Framework
from shardscope.analytic.memory.offload import OFFLOADS_STATES
from shardscope.analytic.memory.states import ElementBytes, known_recipe
from shardscope.analytic.schedules.closed import columns
from shardscope.errors import unknown_name
from shardscope.spec.model import Transformer


class Shape(NamedTuple):
    """Degrees and sizes of each layout, as floats."""

    tokens: Floats
    """Tokens of a micro-batch on one context rank."""
    span: Floats
    """Tokens that one token attends to on one context rank."""
    tensor: Floats
    divided: Floats
    """Number of tensor-parallel ranks over which sequence parallelism shards the otherwise replicated activations; 1
    without sequence parallelism."""


class LayerSaved(NamedTuple):
    """Bytes that one layer saves for one micro-batch."""

    kept: Floats
    again: Floats
    """Bytes that recomputation restores during the layer's backward pass."""


class LayoutRows(NamedTuple):
    """A table of layouts for one model and one framework."""

    model: Transformer
    layouts: Layouts
    framework: Framework
    recipe: ElementBytes
    weights: WeightShapes
    pipeline: PipelineColumns
    shape: Shape
    zero_ranks: Floats
    """Number of ranks over which ZeRO partitions."""
    expert_ranks: Floats
    """Number of ranks over which ZeRO partitions experts: those that hold the same experts."""
    borrowed: dict[int, tuple[Floats, Floats]]
    """Fractions of the running layer that other ranks own, for dense weights and for experts. Keys are the ZeRO stages
    from which on the running layer's gradients (2) or parameters (3) must be held beyond the rank's own part."""
    dense: LayerSaved
    mixed: LayerSaved
    in_dense: Floats
    """Working bytes while a dense layer runs."""
    in_mixed: Floats
    at_loss: Floats


def rows_of(model: Transformer, layouts: Layouts, framework: str | Framework) -> LayoutRows:
    """Compute the values that all stages share, for a framework or the name of one."""
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
    return LayoutRows(
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
    """Return the framework of this name; raise a `SpecError` if it is unknown."""
    if isinstance(framework, Framework):
        return framework
    if framework not in FRAMEWORKS:
        raise unknown_name("framework", framework, FRAMEWORKS)
    return FRAMEWORKS[framework]


def _borrowed(
    layouts: Layouts, stage: int, zero_ranks: Floats, expert_ranks: Floats
) -> tuple[Floats, Floats]:
    """Fractions of the running layer that other ranks own; 1 at every stage if all states are offloaded."""
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


def _working(model: Transformer, layouts: Layouts, shape: Shape, recipe: ElementBytes) -> Floats:
    layer = saved.in_a_layer(model, recipe, tokens=shape.tokens, tensor=shape.tensor, divided=shape.divided)
    if layouts.flash_attention:
        return layer
    scores = saved.in_the_attention(model, recipe, tokens=shape.tokens, span=shape.span, tensor=shape.tensor)
    return np.maximum(layer, scores)


def _layer(
    model: Transformer,
    layouts: Layouts,
    shape: Shape,
    recipe: ElementBytes,
    framework: Framework,
    *,
    mixed: bool,
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


class PipelineColumns(NamedTuple):
    """Values of each layout that do not depend on the rank's place in its pipeline."""

    ranks: Floats
    microbatches: Floats
    chunks: Floats
    """Number of non-adjacent parts of the model on each rank."""
    interleaved: npt.NDArray[np.bool_]
    rounded: npt.NDArray[np.bool_]
    """Whether the schedule is a V of building blocks, which hold whole micro-batches."""
    in_thirds: npt.NDArray[np.bool_]
    """Whether ranks 0, 3, 6, ... hold one micro-batch fewer if the number of ranks modulo 3 is 2."""
    head_at: Floats
    """Rank with the output projection: the last, or the first in a V-shaped schedule."""
    layers: Floats
    """Number of layers on each rank."""
    rest: Floats
    """Number of remaining layers, which are assigned to the first ranks, one each."""
    of_left: Floats
    of_all: Floats
    constant: Floats


class Holding(NamedTuple):
    """Layers and micro-batches that one pipeline rank holds."""

    layers: Floats
    mixed: Floats | None
    """Number of its layers with experts; None if the model has none."""
    embedding: Floats
    """1 on the rank that holds the embedding, else 0."""
    head: Floats
    """1 on the rank that holds the output projection, else 0."""
    in_flight: Floats
    """Activations that the rank keeps, in units of one micro-batch's activations on the whole rank."""


def pipeline_of(layouts: Layouts, layers: int) -> PipelineColumns:
    """Return the pipelines of the layouts, for a model's number of layers."""
    ranks, schedule = layouts.pipeline.astype(float), layouts.schedule
    known = columns()
    folded, interleaved = known.v_shaped[schedule], known.leaves_stages[schedule]
    own = np.floor(layers / ranks)
    return PipelineColumns(
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


def held_by(place: Floats, pipeline: PipelineColumns, *, dense: int | None) -> Holding:
    """Return the layers and micro-batches that the rank at `place` holds.

    Args:
        place: Place of the rank in the pipeline, from 0, one for each layout.
        pipeline: The layouts' pipelines.
        dense: Number of leading layers without experts; None if no layer has experts.
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


def _in_flight(place: Floats, pipeline: PipelineColumns) -> Floats:
    """Activations in flight on the rank at `place`, in units of one micro-batch's activations on the whole rank.

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
        some = np.flatnonzero(pipeline.in_thirds)  # a remainder takes ten times as long as an addition
        whole[some] -= (pipeline.ranks[some] % 3 == 2) & (np.broadcast_to(place, whole.shape)[some] % 3 == 0)
        held = np.where(pipeline.rounded, np.minimum(whole, (pipeline.microbatches + place + 1) / 2), held)
    return np.minimum(held, pipeline.microbatches)


Matrix = tuple[int, int]
"""Number of inputs and of outputs of a linear layer."""


class WeightShapes(NamedTuple):
    """Matrix shapes and element counts of a model's weights, per layer unless stated otherwise."""

    attention: tuple[Matrix, ...]
    """Linear layers that tensor parallelism shards."""
    dense: tuple[Matrix, ...]
    """Linear layers of the feed-forward layer, in layers without a mixture."""
    shared: tuple[Matrix, ...]
    """Linear layers of the shared experts, which process every token."""
    expert: tuple[Matrix, ...]
    """Linear layers of one routed expert."""
    expert_params: int
    """Elements of all routed experts."""
    key_params: int
    """Elements of `attention` for keys and values; 0 with latent attention, whose heads are all sharded."""
    key_heads: int
    """Number of key-value heads; additional tensor-parallel ranks hold copies, as in Megatron-Core."""
    whole: int
    """Elements that are replicated on every tensor-parallel rank: norms, biases, low-rank projections."""
    whole_mixed: int
    """Elements that are replicated on every tensor-parallel rank in a layer with experts, including its router."""
    table: int
    """Elements of the word embedding, in the whole model."""
    head: int
    """Elements of the output projection, in the whole model; if it is tied, those of `table`."""
    before: int
    """Elements before the first layer that are replicated on every tensor-parallel rank: positions."""
    behind: int
    """Elements after the last layer that are replicated on every tensor-parallel rank: the final norm."""
    tied: bool

    @property
    def attention_params(self) -> int:
        """Number of elements of `attention`, which tensor parallelism shards."""
        return _size(self.attention)

    @property
    def dense_params(self) -> int:
        """Number of elements of `dense`, which tensor parallelism shards."""
        return _size(self.dense)

    @property
    def shared_params(self) -> int:
        """Number of elements of `shared`, which tensor parallelism shards."""
        return _size(self.shared)

    def repeated_keys(self, tensor: Floats) -> Floats:
        """Elements of a layer that a rank holds beyond its 1/t share, if there are more ranks than key-value heads."""
        return self.key_params * (1 / np.minimum(tensor, self.key_heads) - 1 / tensor)

    def factors(self, *, mixed: bool, experts: int) -> int:
        """Total number of rows and columns of one layer's matrices: of its experts if `mixed`, else of all others."""
        if mixed:
            return experts * sum(map(sum, self.expert))
        return sum(map(sum, (*self.attention, *(self.shared or self.dense))))


def _size(matrices: tuple[Matrix, ...]) -> int:
    return sum(rows * columns for rows, columns in matrices)


@lru_cache(maxsize=256)
def weights(model: Transformer) -> WeightShapes:
    """Return the weights of a model."""
    mixture, attention = model.mixture, _attention(model)
    dense = _feed_forward(model, model.ffn)
    shared = _feed_forward(model, mixture.shared_ffn) if mixture and mixture.shared_ffn else ()
    mixed = _size(attention) + _size(shared) + model.expert_params
    table = model.vocab * model.hidden
    own_head = 0 if model.tied or not model.lm_head else table
    return WeightShapes(
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
    """Gate and up projection as one matrix, as in Megatron and vLLM, and the down projection."""
    return (model.hidden, (1 + model.gated) * inner), (inner, model.hidden)


def _attention(model: Transformer) -> tuple[Matrix, ...]:
    """Matrices that tensor parallelism shards: all of them, or with latent attention only the up-projections."""
    latent, hidden, heads = model.latent, model.hidden, model.heads
    if latent is None:
        width = heads * model.head_size
        return (hidden, width + 2 * model.kv_heads * model.head_size), (width, hidden)
    query = latent.nope_size + latent.rope_size
    up = (latent.kv_rank, heads * (latent.nope_size + latent.value_size))
    return (latent.query_rank or hidden, heads * query), up, (heads * latent.value_size, hidden)
