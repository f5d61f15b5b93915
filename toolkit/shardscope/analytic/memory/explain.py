"""Memory of one layout as a tree of terms: stages, types of memory, and blocks with formula, inputs and source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory.activations import logit_bytes
from shardscope.analytic.memory.device import peak_at
from shardscope.analytic.memory.frameworks import Framework
from shardscope.analytic.memory.moments import (
    AT_LOSS,
    BEGINS,
    ENDS,
    FORWARD,
    HEAD,
    LAST_BUT_ONE,
    LAST_MIXED,
    LOGITS,
    LOSS,
    MOMENTS,
    ROOT,
    SECOND,
    UPDATE,
    Peak,
    UnitMoment,
    gradients_of,
)
from shardscope.analytic.memory.offload import OFFLOADS_ACTIVATIONS, OFFLOADS_OPTIMIZER, OFFLOADS_STATES
from shardscope.analytic.memory.room import tensor_room
from shardscope.analytic.memory.rows import NONE, Floats, Holding, LayoutRows, held_by, rows_of
from shardscope.analytic.memory.stage import (
    Blocks,
    Elements,
    blocks_of,
    bucket_bytes,
    elements_of,
    gradient_bytes,
)
from shardscope.analytic.recomputation import recomputed_layers
from shardscope.analytic.terms import Term
from shardscope.spec.cluster import Device
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Types of memory on a device, in the order of `MemoryParts`."""
ZERO = "Rajbhandari et al. 2020 (arXiv 1910.02054), section 3"
KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198)"
_SAVED_FORMULAS = {
    "none": "micro-batches in flight × layers × bytes per layer",
    "selective": "micro-batches in flight × layers × bytes per layer{}",
    "full": "micro-batches in flight × layers × 2bsh / t′",
}
_SAVED_IN_PART = (
    "micro-batches in flight × (recomputed layers × 2bsh / t′ + other layers × bytes per stored layer)"
)
_RECOMPUTED_TOO = {
    "none": "",
    "selective": "{}",
    "full": ", and recomputed activations of the layer",
}
_EVERY_OTHER = (
    ", of which attention and every second matrix product are kept",
    ", and activations that the layer recomputes",
)
_CORE = ", without core attention", ", and recomputed core attention"
_AFTER_OTHERS = (
    ", and recomputed activations as far as they exceed those of the stored layers, which are freed before"
)
SYMBOLS = {
    "Ψ": "parameters on a rank",
    "N": "number of ranks that share the state",
    "b": "samples per micro-batch",
    "s": "tokens of a sequence on a rank",
    "h": "hidden size",
    "V": "vocabulary size",
    "t": "number of tensor ranks",
    "t′": "number of tensor ranks with sequence parallelism, else 1",
}
"""Meaning of each symbol in the formulas of terms."""
Inputs = dict[str, float | str]


class _Stages(NamedTuple):
    """Inputs and results of the memory formulas for all stages of a layout, as arrays by stage."""

    rows: LayoutRows
    layout: Layout
    held: Holding
    own: Elements
    blocks: Blocks
    peak: Peak
    gradients: Floats
    """All gradients of each stage, in bytes."""
    gradient_bytes: Floats | float
    """Bytes of a gradient of one parameter."""


def memory_term(
    model: Transformer,
    layout: Layout,
    device: Device | None = None,
    *,
    framework: str | Framework = "megatron-core",
) -> Term:
    """Return the memory of the device with the highest peak, as a tree of terms in bytes.

    The root is the maximum over pipeline stages. A stage is the sum over types of memory, and these are sums of blocks.

    Args:
        model: The model.
        layout: The layout.
        device: Device that the layout runs on; the memory available to tensors (`tensor_room`) is added to the inputs
            of the root. None for a GPU of unknown architecture, which counts as a Hopper GPU.
        framework: A key of `FRAMEWORKS`, or your own `Framework`.

    Example:
        >>> from shardscope.spec.model import Model
        >>> model = Model.transformer(layers=4, hidden=64, heads=4, vocab=256, seq=128)
        >>> memory_term(model, Layout(pipeline=2, global_batch=8))["stage 1"]["logits"].value > 0
        True
    """
    stages = _stages_of(model, layout, framework, device)
    parts = tuple(_stage(stages, place) for place in range(layout.pipeline))
    largest = max(part.value for part in parts)
    known = stages.rows.framework
    capacity = {"capacity": tensor_room(device, known)} if device else {}
    source = known.name
    return Term("memory", largest, "bytes", inputs=capacity, source=source, parts=parts, how="max")


def _stages_of(
    model: Transformer, layout: Layout, framework: str | Framework, device: Device | None
) -> _Stages:
    rows = rows_of(model, Layouts.of([layout] * layout.pipeline), framework, device)
    places = np.arange(float(layout.pipeline))
    held = held_by(places, rows.pipeline, dense=model.mixture.dense_layers if model.mixture else None)
    blocks = blocks_of(rows, places)
    own, peak = elements_of(rows, held), peak_at(blocks, rows)
    return _Stages(rows, layout, held, own, blocks, peak, gradients_of(blocks), gradient_bytes(rows))


def _stage(stages: _Stages, place: int) -> Term:
    """Return the memory of stage number `place` as a term."""

    def at(values: Any) -> float:
        if isinstance(values, np.ndarray):
            values = values.item(place if values.size > 1 else 0)
        return float(values)

    kinds = (*_states(stages, at), _activations(stages, at), _buffers(stages, at))
    return Term.total(f"stage {place}", kinds)


def _moment(stages: _Stages, at: At) -> str:
    """Return the name of the moment at which a stage's memory peaks."""
    return MOMENTS[int(at(stages.peak.moment))]


def _unit(blocks: Blocks, moment: int) -> UnitMoment | None:
    """Return the memory of a stage at `moment` if its ranks gather whole units, else None."""
    return next((unit for unit in blocks.units if unit.moment == moment), None)


At = Callable[[Any], float]
"""Function that selects one stage's value from an array with one value per stage."""


def _states(stages: _Stages, at: At) -> tuple[Term, ...]:
    """Return the terms of parameters, gradients and optimizer state, each with parts for experts and other weights."""
    rows, blocks, own, recipe = stages.rows, stages.blocks, stages.own, stages.rows.recipe
    widths = {
        "parameters": recipe.parameter,
        "gradients": at(stages.gradient_bytes),
        "optimizer": recipe.master + stages.layout.optimizer.states.bytes_per_param(recipe.state),
    }
    stage = stages.layout.zero
    shards_weights = stage >= 3 - rows.casts or bool(rows.gathers_units[0])
    sharded = {"parameters": shards_weights, "gradients": rows.shards_gradients[0], "optimizer": stage >= 1}
    narrowed = {"parameters": recipe.narrowed}
    terms = []
    exist = at(stages.gradients)
    existing = {"gradients": at(stages.peak.gradients) / exist if exist else 1.0}
    for number, (kind, width) in enumerate(widths.items()):
        groups: list[tuple[str, Floats, Floats, Floats]] = [
            (_NAMES[kind], blocks.dense[number], own.dense, rows.zero_ranks)
        ]
        if own.experts is not None:
            groups.append(
                (f"{_NAMES[kind]}, experts", blocks.experts[number], own.experts, rows.expert_ranks)
            )
        is_sharded = bool(sharded[kind])
        parts = [
            _state(
                stages.layout,
                name,
                at(value),
                width,
                at(count),
                at(ranks),
                is_sharded=is_sharded,
                narrowed=narrowed.get(kind, 0),
            )
            for name, value, count, ranks in groups
        ]
        if kind == "parameters" and at(stages.peak.copies):
            parts.append(_copies(stages, at))
        away = (OFFLOADS_OPTIMIZER if kind == "optimizer" else OFFLOADS_STATES)[rows.layouts.offload][0]
        if away:
            parts = [_offloaded(part, stages.layout) for part in parts]
        elif existing.get(kind, 1.0) != 1.0:
            parts = [_existing(part, existing[kind], _moment(stages, at)) for part in parts]
        terms.append(Term.total(kind, tuple(parts)))
    return tuple(terms)


def _existing(term: Term, share: float, moment: str) -> Term:
    """Return the gradient term times `share`, the fraction allocated at the peak; it is above 1 while gradients are
    added up.
    """
    formula = f"{term.formula} × fraction allocated {moment}"
    inputs = {**term.inputs, "fraction allocated": share}
    return Term(term.name, share * term.value, "bytes", formula, inputs, term.source)


_NAMES = {"parameters": "weights", "gradients": "gradients of weights", "optimizer": "optimizer state"}


def _state(  # noqa: PLR0917
    layout: Layout,
    name: str,
    value: float,
    width: float,
    count: float,
    ranks: float,
    *,
    is_sharded: bool,
    narrowed: int,
) -> Term:
    """Return the term of one type of model states, for experts or for other weights.

    `width` is in bytes per parameter; elements of layers' matrices take `narrowed` bytes less. `count` parameters are
    on this rank, or sharded over `ranks` ranks.
    """
    inputs: Inputs = {"Ψ on this rank": count}
    formula = f"{width:.4g}Ψ"
    if narrowed:
        formula = f"({formula} - {narrowed}Ψ of layers' matrices, in fp8)"
    if is_sharded:
        inputs["N"] = ranks
        formula += " / N"
    return Term(name, value, "bytes", formula, inputs, f"{ZERO}, stage {layout.zero}")


def _copies(stages: _Stages, at: At) -> Term:
    recipe, whole = stages.rows.recipe, stages.rows.casts and stages.layout.zero == 2
    formula = f"{recipe.copies}Ψ" + ("" if whole else ", matrices only")
    if recipe.master:
        source = "TransformerEngine 2.x's fp8 weights and, if needed, their transposes"
    else:
        formula += f", those allocated {_moment(stages, at)}"
        source = "weights gathered in 16 bits" if whole else "autocast's cache"
    inputs: Inputs = {"bytes per copy": recipe.copies}
    return Term("low-precision copies", at(stages.peak.copies), "bytes", formula, inputs, source)


def _offloaded(term: Term, layout: Layout) -> Term:
    """Return the term with 0 bytes, because its data is in host memory and not on the device."""
    formula = f"in host memory (offload={layout.offload!r})"
    return Term(term.name, 0.0, "bytes", formula, term.inputs, term.source)


def _selected(stages: _Stages) -> tuple[str, str]:
    """Return text on what selective recomputation keeps and recomputes; empty with fused attention."""
    if stages.rows.framework.every_other_product:
        return _EVERY_OTHER
    return ("", "") if stages.layout.flash_attention else _CORE


def _activations(stages: _Stages, at: At) -> Term:
    """Return the term of saved activations."""
    rows, layout, held, blocks = stages.rows, stages.layout, stages.held, stages.blocks
    is_away = bool(OFFLOADS_ACTIVATIONS[rows.layouts.offload][0])
    shape = rows.shape
    inputs: Inputs = {
        "micro-batches in flight": at(held.in_flight),
        "layers": at(held.layers),
        "bytes per layer": at(blocks.saved_once) / at(held.layers),
        "bs": at(shape.tokens),
        "h": rows.model.hidden,
        "t": layout.tensor,
        "t′": at(shape.divided),
    }
    formula = _SAVED_FORMULAS[layout.recompute].format(_selected(stages)[0])
    if layout.recompute_layers:
        formula = _SAVED_IN_PART
        inputs |= {
            "recomputed layers": float(recomputed_layers(at(held.layers), rows.layouts.most_recomputed[0])),
            "bytes per stored layer": at((rows.dense if held.mixed is None else rows.mixed).whole),
        }
    if is_away:
        formula = "the current layer and the next one; the rest is in host memory"
    if wider := int(at(rows.wider)):
        formula = formula.replace("2bsh", f"{2 + wider}bsh")
    is_torch = bool(rows.in_torch[0])
    if is_torch and not is_away:
        formula += ", without stage inputs, which are in receive buffers"
    kept = f"micro-batches in flight × 2bsh{' / t' * rows.framework.shards_outputs}"
    if is_torch:
        kept = (
            "(micro-batches in flight × stages - 1) × 2bsh; on the last stage also logits and log-probabilities; "
            "delayed gradients"
        )
    mask_bytes, outputs = at(blocks.embedding_mask), at(blocks.outputs)
    moment = int(at(stages.peak.moment))
    if moment == ENDS and not is_away:
        formula += ", except all layers but the first of one micro-batch"
    elif moment in (SECOND, LAST_MIXED, LAST_BUT_ONE, ROOT) and not is_away:
        formula += ", except layers whose backward pass is over"
    elif moment == FORWARD and not is_away:
        formula += ", except the last layer"
    elif moment == UPDATE:
        formula, mask_bytes, outputs = "freed before the update", 0.0, 0.0
    layers = Term(
        "saved by layers", at(stages.peak.activations) - mask_bytes - outputs, "bytes", formula, inputs,
        f"{KORTHIKANTI}, equations 1 to 6; micro-batches in flight under {layout.schedule}",
    )  # fmt: skip
    others = (
        Term("dropout mask of the embedding", mask_bytes, "bytes", "micro-batches in flight × bsh / t′",
             {"micro-batches in flight": at(held.in_flight)}, f"{KORTHIKANTI}, section 4.3"),
        Term("outputs of the stage", outputs, "bytes", kept,
             {"micro-batches in flight": at(held.in_flight), "t": layout.tensor}, rows.framework.source),
    )  # fmt: skip
    return Term.total("activations", (layers, *(term for term in others if term.value)))


def _working(stages: _Stages, unit: UnitMoment | None, at: At) -> Term:
    """Return the term of temporary tensors at the peak."""
    rows, layout, blocks, moment = stages.rows, stages.layout, stages.blocks, int(at(stages.peak.moment))
    habits = rows.framework
    of_logit, later = logit_bytes(habits, rows.recipe)
    inputs: Inputs = {
        "bs": at(rows.shape.tokens), "h": rows.model.hidden, "V": rows.model.vocab, "t": layout.tensor,
        "bytes per logit": of_logit,
    }  # fmt: skip
    source = f"{habits.name}: {habits.source}"
    if moment == UPDATE:
        return Term(
            "gradients during the update", at(blocks.update), "bytes",
            "(4Ψ in float32, plus 2Ψ flat with ZeRO) / N + flat buffers, which stay allocated",
            {"N": at(rows.zero_ranks)}, source,
        )  # fmt: skip
    if moment in AT_LOSS:
        logits = at(blocks.at_loss)
        if moment == LOSS and blocks.early is not None:
            logits -= at(blocks.early.logits_later)
            inputs["bytes per logit"] = of_logit - later
        return Term(
            "logits", logits, "bytes",
            f"bsV × bytes per logit{'' if habits.whole_logits else ' / t'}"
            " + 3 × 2bsh / t′ + 2 × 2bsh where t′ > 1", inputs, source,
        )  # fmt: skip
    if unit is not None and moment == ROOT:
        return Term("last gradients", 0.0, "bytes", "in the gradient bucket", inputs, source)
    if moment == FORWARD:
        of_layer = blocks.early.in_forward if unit is None and blocks.early else unit and unit.working
        return Term(
            "temporary tensors of a forward pass", at(of_layer), "bytes",
            "input and output of the activation function, 3 × bsh",
            inputs, source,
        )  # fmt: skip
    if unit is not None and moment == HEAD:
        return Term(
            "gradient of logits", at(unit.working), "bytes", "(bsV / t + 3bsh / t′) × bytes per activation",
            inputs | {"bytes per activation": rows.recipe.activation}, source,
        )  # fmt: skip
    return Term(
        "temporary tensors of a backward pass", at(blocks.in_layer), "bytes",
        "gradients of the residual stream and of activations inside the layer"
        + (_AFTER_OTHERS if layout.recompute_layers else _RECOMPUTED_TOO[layout.recompute].format(_selected(stages)[1]))
        + (", and the output of the stage" if habits.shards_outputs and layout.pipeline > 1 else ""),
        inputs, source,
    )  # fmt: skip


def _received(rows: LayoutRows, ranks: float) -> tuple[str, Inputs, str]:
    """Return the formula of receive buffers, its inputs and its source."""
    if rows.in_torch[0]:
        formula = (
            "micro-batches × (stage input and gradient of stage output) × 2bsh, plus one message being sent"
        )
        return formula, {"micro-batches": rows.pipeline.microbatches[0]}, rows.framework.source
    return "2 × a slice (at most 4 MiB) of a chunk", {"N": ranks}, "ring collectives of Shardscope's jobs"


def _buffers(stages: _Stages, at: At) -> Term:
    """Return the term of buffers: temporary tensors at the peak, gathered parameters, and others."""
    rows, layout, blocks, moment = stages.rows, stages.layout, stages.blocks, int(at(stages.peak.moment))
    habits, ranks, unit = rows.framework, at(rows.zero_ranks), _unit(blocks, moment)
    source = f"{habits.name}: {habits.source}"
    gathered, bucket = "(1 + prefetched layers) × largest layer × (1 - 1/N)", "largest layer × (1 - 1/N)"
    if habits.live_elements:
        gathered = "live parameters, or the largest matrix; all weights if autograd keeps them"
    if habits.bucket_elements:
        bucket = "flat buffers, and the largest matrix if it is larger than a buffer"
    if habits.copies_to_reduce and at(blocks.copied):
        bucket = "copies of all gradients"
    flat = {
        "elements per buffer": habits.bucket_elements,
        "buffers": habits.buckets if layout.zero >= 3 else 1,
    }
    in_bucket = blocks.copied if moment == UPDATE else blocks.standing
    if moment in (BEGINS, ENDS):
        arriving = NONE if blocks.early is None else blocks.early.arriving
        in_bucket = blocks.bucket + arriving
        if at(arriving):
            bucket += ", and the largest gradients before they are added to those of an earlier micro-batch"
    in_gathered = blocks.gathered * (moment != UPDATE)
    if unit is not None:
        gathered, bucket = (
            "root unit, current layer and prefetched layer",
            "gradients before they are reduced",
        )
        in_gathered, in_bucket = unit.gathered, unit.bucket
        if layout.zero == 2:
            gathered = "all units whose backward pass is not over"
        elif moment in (LOSS, LOGITS, ROOT):
            gathered = "root unit"
    others = (
        Term("gathered parameters", at(in_gathered), "bytes", gathered,
             {"N": ranks, "prefetched layers": habits.prefetched, "live parameters": habits.live_elements},
             f"{ZERO}, stage {layout.zero}"),
        Term("gradient bucket", at(in_bucket), "bytes", bucket,
             {"N": ranks, "bytes per gradient": bucket_bytes(rows)} | flat,
             f"{ZERO}, stage 2" if layout.zero else source),
        Term("gradient placeholders", at(blocks.placeholders), "bytes", "(one tensor per distinct weight shape) / t",
             {"t": layout.tensor}, "TransformerEngine 2.x, get_dummy_wgrad"),
        Term("matrix-product workspace", at(blocks.workspace), "bytes", "constant", {},
             "torch's cuBLAS workspaces for the forward and the backward thread"),
        Term("receive buffers", at(blocks.received), "bytes", *_received(rows, ranks)),
    )  # fmt: skip
    return Term.total("buffers", (_working(stages, unit, at), *(term for term in others if term.value)))
