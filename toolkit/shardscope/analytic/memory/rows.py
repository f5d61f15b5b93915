"""Inputs of the memory formulas that are the same for all stages of a layout, computed once per table of layouts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import activations as saved
from shardscope.analytic.memory.architecture import reads_any_fp8_layout
from shardscope.analytic.memory.frameworks import FRAMEWORKS, Framework
from shardscope.analytic.memory.offload import OFFLOADS_STATES
from shardscope.analytic.memory.states import ElementBytes, known_recipe
from shardscope.analytic.memory.weights import WeightShapes, weights
from shardscope.analytic.schedules.closed import columns
from shardscope.errors import unknown_name
from shardscope.spec.cluster import Device
from shardscope.spec.model import Transformer


class Shape(NamedTuple):
    """Sizes and degrees of each layout that determine the size of activations, as floats."""

    tokens: Floats
    """Tokens of a micro-batch on one context rank."""
    span: Floats
    """Tokens that one token attends to on one context rank."""
    tensor: Floats
    """Tensor-parallel degree."""
    divided: Floats
    """Number of ranks over which sequence parallelism shards activations that tensor parallelism replicates; 1 without
    sequence parallelism."""


class LayerSaved(NamedTuple):
    """Bytes of activations that one layer's backward pass needs for one micro-batch."""

    kept: Floats
    """Bytes saved from the forward pass to the backward pass."""
    again: Floats
    """Bytes recomputed during the layer's backward pass."""

    @property
    def whole(self) -> Floats:
        """Bytes that a layer saves if it recomputes nothing."""
        return self.kept + self.again


class LayoutRows(NamedTuple):
    """Inputs of the memory formulas that are the same for all stages: layouts of one model, framework and device."""

    model: Transformer
    layouts: Layouts
    framework: Framework
    device: Device | None
    recipe: ElementBytes
    weights: WeightShapes
    pipeline: PipelineColumns
    shape: Shape
    zero_ranks: Floats
    """Number of ranks over which ZeRO shards."""
    expert_ranks: Floats
    """Number of ranks over which ZeRO shards experts: those that hold the same experts."""
    shards_gradients: npt.NDArray[np.bool_]
    """Whether ZeRO shards gradients while the gradients of micro-batches accumulate."""
    borrowed: dict[int, tuple[Floats, Floats]]
    """Fraction of the running layer that belongs to other ranks' shards, but is held temporarily. The keys are 2 for
    gradients and 3 for parameters, the lowest ZeRO stages that shard them; the values are pairs for dense weights and
    for experts."""
    dense: LayerSaved
    """Activations of a layer without experts."""
    mixed: LayerSaved
    """Activations of a layer with experts."""
    in_dense: Floats
    """Temporary bytes in the backward pass of a layer without experts."""
    in_mixed: Floats
    """Temporary bytes in the backward pass of a layer with experts."""
    at_loss: Floats
    """Temporary bytes at the loss."""
    recomputes_in_part: bool
    """Whether any layout recomputes only some layers of a stage."""
    wider: Floats
    """Bytes by which an element of the residual stream exceeds that of other activations."""
    casts: bool
    """Whether weights are kept in float32, and cast to 16 bits when they are gathered, as by `Framework.casts`."""
    gathers_units: npt.NDArray[np.bool_]
    """Whether ZeRO gathers and reduces whole units, by layout; see `memory.units`."""
    has_units: bool
    """Whether any layout gathers units."""
    in_torch: npt.NDArray[np.bool_]
    """Whether the layout has a pipeline of `torch.distributed.pipelining`, as in `Framework.keeps_outputs`."""
    has_torch: bool
    """Whether any layout has such a pipeline."""


def rows_of(
    model: Transformer, layouts: Layouts, framework: str | Framework, device: Device | None = None
) -> LayoutRows:
    """Return the inputs that are the same for all stages.

    Args:
        model: The model.
        layouts: Table of layouts.
        framework: A key of `FRAMEWORKS`, or your own `Framework`.
        device: Device that the layouts run on; None for a GPU to which no exception in `memory.architecture` applies.
    """
    framework = known_framework(framework)
    if framework.autocast_logits and layouts.precision.endswith("autocast"):
        logits, later = framework.autocast_logits
        framework = framework._replace(logits_bytes=logits, logits_later=later)
    recipe, shape = _recipe(layouts.precision, framework, device), _shape(model, layouts)
    zero_ranks, casts = layouts.shard.astype(float), _casts(layouts.precision, framework)
    wider = _wider(layouts, recipe, casts=casts)
    dense = _layer(model, layouts, shape, recipe, framework, wider=wider, mixed=False)
    in_dense = _working(model, layouts, shape, recipe)
    mixed, in_mixed, expert_ranks = dense, in_dense, zero_ranks
    if model.mixture:
        mixed = _layer(model, layouts, shape, recipe, framework, wider=wider, mixed=True)
        in_mixed = saved.in_a_mixture(
            model, model.mixture, recipe, framework, expert=layouts.expert, tokens=shape.tokens,
            tensor=shape.tensor, divided=shape.divided,
        )  # fmt: skip
        expert_ranks = np.maximum(1.0, zero_ranks / layouts.expert)
    sharded, gathers = shards_gradients(layouts, framework), _gathers_units(layouts, framework, recipe)
    in_torch = (layouts.pipeline > 1) & (framework.keeps_outputs and framework.whole_in_pipelines)
    return LayoutRows(
        model=model,
        layouts=layouts,
        framework=framework,
        device=device,
        recipe=recipe,
        weights=weights(model),
        pipeline=pipeline_of(layouts, model.layers),
        shape=shape,
        zero_ranks=zero_ranks,
        expert_ranks=expert_ranks,
        shards_gradients=sharded,
        borrowed={
            2: _borrowed(layouts, sharded, zero_ranks, expert_ranks),
            3: _borrowed(layouts, layouts.zero >= 3, zero_ranks, expert_ranks),
        },
        dense=dense,
        mixed=mixed,
        in_dense=in_dense,
        in_mixed=in_mixed,
        at_loss=saved.at_the_loss(
            model, recipe, framework, tokens=shape.tokens, tensor=shape.tensor, divided=shape.divided
        ),
        recomputes_in_part=bool(layouts.recompute_layers.any()),
        wider=wider,
        casts=casts,
        gathers_units=gathers,
        has_units=bool(gathers.any()),
        in_torch=in_torch,
        has_torch=bool(in_torch.any()),
    )


def known_framework(framework: str | Framework) -> Framework:
    """Return the framework with this name.

    Raises:
        SpecError: The name is unknown.
    """
    if isinstance(framework, Framework):
        return framework
    if framework not in FRAMEWORKS:
        raise unknown_name("framework", framework, FRAMEWORKS)
    return FRAMEWORKS[framework]


def _recipe(precision: str, framework: Framework, device: Device | None) -> ElementBytes:
    """Return the bytes per element of a precision, as the framework stores them on the device."""
    if _casts(precision, framework):
        return known_recipe(precision.replace("mixed", "autocast"))
    recipe = known_recipe(precision)
    if precision == "bf16-mixed" and framework.remainders:
        return recipe._replace(master=2)
    if precision != "fp8-mixed":
        return recipe
    in_fp8 = 1 if framework.skips_transposes and reads_any_fp8_layout(device) else recipe.copies
    if framework.fp8_weights:
        return recipe._replace(copies=0, narrowed=recipe.parameter - in_fp8)
    return recipe._replace(copies=in_fp8)


def _casts(precision: str, framework: Framework) -> bool:
    """Return whether the framework keeps weights in float32 and casts them to the 16 bits of this precision."""
    return framework.casts and precision in ("bf16-mixed", "fp16-mixed")


def _wider(layouts: Layouts, recipe: ElementBytes, *, casts: bool) -> Floats:
    """Return the bytes by which an element of the residual stream exceeds that of other activations.

    Autocast leaves the embedding's output and sums in float32, and also computes norms in float32. FSDP2's gathered
    weights and activations are all in 16 bits (`fully_shard` with a `MixedPrecisionPolicy`).
    """
    is_autocast = recipe.copies > 0 and not recipe.master
    width = (recipe.parameter - recipe.activation) * is_autocast
    return np.where(layouts.zero >= 2, 0.0, width) if casts else np.full(1, float(width))


def shards_gradients(layouts: Layouts, framework: Framework) -> npt.NDArray[np.bool_]:
    """Return whether accumulating gradients are sharded, and therefore reduced for every micro-batch, by layout."""
    sharded = layouts.zero >= 2
    return sharded & (layouts.pipeline == 1) if framework.whole_in_pipelines else sharded


def _gathers_units(layouts: Layouts, framework: Framework, recipe: ElementBytes) -> npt.NDArray[np.bool_]:
    """Return whether ZeRO gathers and reduces whole units, by layout; false in pipelines and with master weights."""
    if not framework.gathers_units or recipe.master:
        return np.zeros(len(layouts), bool)
    return np.asarray((layouts.zero >= 2) & (layouts.pipeline == 1) & (layouts.shard > 1))


def _borrowed(
    layouts: Layouts, is_on: npt.NDArray[np.bool_], zero_ranks: Floats, expert_ranks: Floats
) -> tuple[Floats, Floats]:
    """Return the fractions of the running layer's dense weights and experts that belong to other ranks' shards.

    If all states are offloaded, the fractions are 1, because the whole layer is on the device only while it runs.
    """
    away = OFFLOADS_STATES[layouts.offload]
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
    """Return the bytes of temporary buffers in the backward pass of a dense layer."""
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
    wider: Floats,
    mixed: bool,
) -> LayerSaved:
    """Return the activations of one layer, with experts if `mixed`.

    A layer saves the residual stream twice, as the inputs of its norms, or once if both halves share a norm.
    """
    stream = wider * model.hidden * shape.tokens / shape.divided
    part = saved.outside_core(model, recipe, framework, mixed=mixed)
    outside = saved.per_layer(part, (0.0, 0.0), **shape._asdict(), key_heads=model.kv_heads)
    core = saved.core(
        model, recipe, framework, flash=layouts.flash_attention, context=layouts.context, **shape._asdict()
    )
    full = layouts.recompute == saved.FULL
    kept_core = core if layouts.flash_attention else core * (layouts.recompute != saved.SELECTIVE)
    entry = saved.entry(model, recipe, tokens=shape.tokens, divided=shape.divided) + stream
    outside = outside + min(model.norms_per_layer, 2) * stream
    whole = outside + core
    kept = np.where(full, entry, outside + kept_core)
    if framework.every_other_product and not mixed:
        half = saved.per_layer(
            saved.every_other_product(model, recipe), (0.0, 0.0), **shape._asdict(), key_heads=model.kv_heads
        )
        kept = np.where(layouts.recompute == saved.SELECTIVE, np.minimum(half + stream + core, whole), kept)
    return LayerSaved(kept, whole - kept)


Floats = npt.NDArray[np.float64]
NONE = np.zeros(1)
"""No bytes, for every layout of a table."""


class PipelineColumns(NamedTuple):
    """Properties of each layout's pipeline that are the same for all its ranks."""

    ranks: Floats
    microbatches: Floats
    chunks: Floats
    """Number of stages on each rank, which are non-adjacent parts of the model."""
    interleaved: npt.NDArray[np.bool_]
    rounded: npt.NDArray[np.bool_]
    """Whether activations in flight are rounded down, as in `HeldTerms.is_rounded`."""
    in_thirds: npt.NDArray[np.bool_]
    """Whether ranks 0, 3, 6, ... hold one micro-batch fewer if the number of ranks modulo 3 is 2."""
    head_at: Floats
    """Rank with the output projection: the last, or the first in a V-shaped schedule."""
    layers: Floats
    """Minimum number of layers on a rank."""
    rest: Floats
    """Number of ranks with one additional layer; these are the first ranks, or those between the ends."""
    ends: npt.NDArray[np.bool_]
    """Whether embedding and output take a layer's place, so that the first and the last rank have one layer less."""
    of_left: Floats
    """Coefficient of activations in flight, as in `HeldTerms`; the next two fields are the other coefficients."""
    of_all: Floats
    constant: Floats


class Holding(NamedTuple):
    """Layers that one pipeline rank holds, and the activations it keeps."""

    layers: Floats
    """Number of layers on the rank."""
    mixed: Floats | None
    """Number of layers with experts on the rank; None if the model has no experts."""
    embedding: Floats
    """1 on the rank that holds the embedding, else 0."""
    head: Floats
    """1 on the rank that holds the output projection, else 0."""
    left: Floats
    """Number of ranks from this one to the last, inclusive."""
    in_flight: Floats
    """Peak activations that the rank keeps, in units of one micro-batch's activations on all layers of the rank."""


def pipeline_of(layouts: Layouts, layers: int) -> PipelineColumns:
    """Return the properties of the layouts' pipelines, for a model with this number of layers.

    If ranks do not divide layers, but layers + 2, the embedding and the output count as layers, as in Llama 3 (arXiv
    2407.21783, section 3.3.2) and BLOOM (``--pp-partition-method "type:transformer|embedding"``).
    """
    ranks, schedule = layouts.pipeline.astype(float), layouts.schedule
    known = columns()
    folded, interleaved = known.v_shaped[schedule], known.leaves_stages[schedule]
    own = np.floor(layers / ranks)
    rest = layers - own * ranks
    return PipelineColumns(
        ranks=ranks,
        microbatches=layouts.num_micro_batches.astype(float),
        chunks=np.where(interleaved, layouts.virtual_stages, 1.0 + folded),
        interleaved=interleaved & (layouts.virtual_stages > 1),
        rounded=known.is_rounded[schedule],
        in_thirds=known.in_thirds[schedule],
        head_at=(ranks - 1) * ~folded,
        layers=own,
        rest=rest,
        ends=(rest == ranks - 2) & (rest > 0) & ~folded,
        of_left=known.of_left[schedule],
        of_all=known.of_all[schedule],
        constant=known.constant[schedule],
    )


def splits_backward(layouts: Layouts) -> npt.NDArray[np.bool_]:
    """Return whether the pipeline splits the backward pass into the gradients of inputs and those of weights."""
    return np.asarray(columns().splits[layouts.schedule] & (layouts.pipeline > 1))


def held_by(place: Floats, pipeline: PipelineColumns, *, dense: int | None) -> Holding:
    """Return the layers that the rank at position `place` of the pipeline holds, and the activations it keeps.

    Args:
        place: Position of the rank in the pipeline, from 0, for each layout.
        pipeline: Properties of the layouts' pipelines.
        dense: Number of leading layers without experts; None if no layer has experts.
    """
    is_more = place < pipeline.rest
    if pipeline.ends.any():
        is_more = np.where(pipeline.ends, (place > 0) & (place <= pipeline.rest), is_more)
    own = pipeline.layers + is_more
    mixed = None
    if dense is not None:
        chunk = own / pipeline.chunks
        mixed = own - np.minimum(np.maximum(dense - place * chunk, 0.0), chunk)
    left = pipeline.ranks - place
    return Holding(
        layers=own,
        mixed=mixed,
        embedding=(place == 0).astype(float),
        head=(place == pipeline.head_at).astype(float),
        left=left,
        in_flight=_in_flight(place, left, pipeline),
    )


def _in_flight(place: Floats, left: Floats, pipeline: PipelineColumns) -> Floats:
    """Return the peak activations of the rank at position `place`, in units of one micro-batch on the whole rank.

    For interleaved 1F1B with p ranks and v stages per rank, the first rank has p (1 + (p-1)/(pv)) (Korthikanti et al.
    2022, section 4.2.3). Without a pipeline, micro-batches follow one another under every schedule.
    """
    ranks = pipeline.ranks
    held = pipeline.of_left * left + pipeline.of_all * ranks + pipeline.constant
    # the rest is computed only where it is needed, because few rows of a search need it
    if (at := np.flatnonzero(pipeline.interleaved)).size:
        chunks, of_left, of_all = pipeline.chunks[at], pipeline.of_left[at], pipeline.of_all[at]
        held[at] = ((chunks - 1) * ranks[at] + (2 * left[at] - 1) * of_left + ranks[at] * of_all) / chunks
        _count_short_ends(held, place, pipeline)
    if (at := np.flatnonzero(pipeline.rounded)).size:
        where, whole = np.broadcast_to(place, held.shape)[at], np.floor(held[at] + 1e-9)
        third = np.flatnonzero(pipeline.in_thirds[at])
        whole[third] -= (ranks[at[third]] % 3 == 2) & (where[third] % 3 == 0)
        held[at] = np.minimum(whole, (pipeline.microbatches[at] + where + 1) / 2)
    return np.where(ranks == 1, 1.0, np.minimum(held, pipeline.microbatches))


def _count_short_ends(held: Floats, place: Floats, pipeline: PipelineColumns) -> None:
    """Correct the activations at the ends of interleaved pipelines if embedding and output replace a layer each.

    The short stages are the first rank's first and the last rank's last. With p ranks and v stages on each, n - (v-1) p
    of n stages in flight on the first rank are short, because p micro-batches of a stage follow p of the previous
    stage. On the last rank, only full stages are in flight at the peak, if there are more than p.
    """
    if not (at := np.flatnonzero(pipeline.interleaved & pipeline.ends)).size:
        return
    where = np.broadcast_to(place, held.shape)
    is_end = (where[at] == 0) | (where[at] == pipeline.ranks[at] - 1)
    if not (at := at[is_end & ((pipeline.layers[at] + 1) % pipeline.chunks[at] == 0)]).size:
        return
    chunks, own, ranks = pipeline.chunks[at], pipeline.layers[at], pipeline.ranks[at]
    stages = held[at] * chunks
    is_first = where[at] == 0
    short = np.where(is_first, stages - (chunks - 1) * ranks, pipeline.microbatches[at] <= ranks)
    held[at] = (stages * (own + 1) / chunks - short) / own


def first_with_gradients(pipeline: PipelineColumns) -> Floats:
    """Return the first position with more micro-batches than activations in flight; the last if V-shaped."""
    ranks, count = pipeline.ranks, pipeline.microbatches
    per_left = np.maximum(pipeline.of_left, 1e-9)
    left = (count - pipeline.of_all * ranks - pipeline.constant) / per_left
    chunks = pipeline.chunks
    of_chunks = (chunks * count - (chunks - 1 + pipeline.of_all) * ranks) / per_left
    left = np.where(pipeline.interleaved, (of_chunks + 1) / 2, left)
    place = np.where(pipeline.rounded, count - 2, ranks + 1 - np.ceil(left - 1e-9))
    return np.asarray(np.clip(place, 0.0, ranks - 1))
