"""Feasibility rules for layouts: each rule as a condition, and as an error message that includes a remedy.

Conditions take numbers, or arrays that follow NumPy broadcasting, and return whether the rule is broken.
`problems` applies them to one layout and yields messages. The planner applies them to columns of a million layouts and
counts the layouts that break each rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardscope.spec.divisors import divisors_text
from shardscope.spec.model import LayerTable, Transformer
from shardscope.spec.pipeline_schedule import PipelineSchedule

if TYPE_CHECKING:
    from shardscope.spec.cluster import Cluster
    from shardscope.spec.layout import Layout


def problems(
    layout: Layout, model: Transformer | LayerTable | None, cluster: Cluster | None
) -> Iterator[str]:
    """Yield a sentence for every rule that the layout breaks; model and cluster rules are checked only if given."""
    yield from _batch(layout)
    yield from _groups(layout)
    yield from _schedule(layout)
    yield from recomputation_faults(layout, cluster)
    if isinstance(model, LayerTable):
        yield from _rows(layout, model)
    elif model is not None:
        yield from _tensor(layout, model)
        yield from _sequence(layout, model)
        yield from _stages(layout, model.layers, model.name)
        yield from _experts(layout, model)
    if cluster is not None and layout.num_devices != cluster.num_devices:
        yield (
            f"data={layout.data} x tensor={layout.tensor} x pipeline={layout.pipeline} x context={layout.context} "
            f"needs {layout.num_devices} devices, but the cluster has {cluster.num_devices}; "
            f"make the product {cluster.num_devices}"
        )


def _batch(layout: Layout) -> Iterator[str]:
    unit = layout.data * layout.micro_batch
    if uneven_batch(layout.global_batch, layout.data, layout.micro_batch):
        nearest = max(1, round(layout.global_batch / unit)) * unit
        yield (
            f"global_batch={layout.global_batch} is not a multiple of data={layout.data} x "
            f"micro_batch={layout.micro_batch} = {unit}; use for example {nearest}"
        )


def _groups(layout: Layout) -> Iterator[str]:
    ranks = layout.data * layout.context
    if layout.shard and indivisible(ranks, layout.shard):
        yield (
            f"shard={layout.shard} does not divide data x context = {ranks}; "
            f"use one of {divisors_text(ranks, near=layout.shard)}"
        )
    if layout.shard and not layout.zero:
        yield f"shard={layout.shard} has no effect with zero=0; use zero=1, 2 or 3, or leave shard out"
    if indivisible(ranks, layout.expert):
        yield (
            f"expert={layout.expert} does not divide data x context = {ranks}; "
            f"use one of {divisors_text(ranks, near=layout.expert)}"
        )
    if layout.sequence_parallel and layout.tensor == 1:
        yield "sequence_parallel=True has no effect with tensor=1; use tensor=2 or more, or leave it out"
    if layout.compression.is_on and ranks == 1:
        yield (
            f"compression={layout.compression.name!r} has no effect with data x context = 1: nothing is sent; "
            "use data=2 or more, or compression='none'"
        )


def _schedule(layout: Layout) -> Iterator[str]:
    schedule, held = PipelineSchedule(name=layout.schedule), layout.virtual_stages
    if layout.pipeline == 1:
        if held != 1:
            yield f"virtual_stages={held} has no effect with pipeline=1; use pipeline=2 or more, or virtual_stages=1"
        return
    least, most = schedule.least_stages, schedule.most_stages
    if held < least or (most is not None and held > most):
        allowed = str(least) if least == most else f"{least} or more"
        yield f"virtual_stages={held}, but schedule={layout.schedule!r} needs {allowed} stages per rank; use {allowed}"
    if uneven_rounds(schedule, layout.pipeline, layout.num_micro_batches):
        yield (
            f"num_micro_batches={layout.num_micro_batches} is not a multiple of pipeline={layout.pipeline}, which "
            f"schedule={layout.schedule!r} requires; change global_batch, micro_batch or data"
        )
    if too_few_microbatches(schedule, layout.pipeline, layout.num_micro_batches):
        yield (
            f"num_micro_batches={layout.num_micro_batches} is too few for schedule={layout.schedule!r} with "
            f"pipeline={layout.pipeline}; use {schedule.least_per_rank * layout.pipeline} or more"
        )


def recomputation_faults(layout: Layout, cluster: Cluster | None) -> Iterator[str]:
    """Yield a sentence for every rule that the number of layers to recompute breaks."""
    if not layout.recompute_layers:
        return
    if layout.recompute != "full":
        yield (
            f"recompute_layers={layout.recompute_layers} has no effect with recompute={layout.recompute!r}; "
            "use recompute='full', or leave recompute_layers out"
        )
    elif cluster is not None and cluster.groups:
        yield (
            f"recompute_layers={layout.recompute_layers} cannot be combined with groups of different "
            "devices, whose stages are divided as if all layers were equal; leave recompute_layers out"
        )


def recomputes_all(layout: Layout) -> bool:
    """Return whether a layout recomputes all layers of each stage."""
    return layout.recompute == "full" and not layout.recompute_layers


def _rows(layout: Layout, model: LayerTable) -> Iterator[str]:
    for name in ("tensor", "context", "expert"):
        if getattr(layout, name) > 1:
            yield (
                f"{name}={getattr(layout, name)}, but {model.name} is a table of layers, which supports only data and "
                f"pipeline parallelism; use {name}=1"
            )
    yield from _stages(layout, len(model.layers), model.name)


def _tensor(layout: Layout, model: Transformer) -> Iterator[str]:
    for name, size in tensor_sizes(model).items():
        if indivisible(size, layout.tensor):
            yield (
                f"tensor={layout.tensor} does not divide {name}={size} of {model.name}; "
                f"use one of {divisors_text(size, near=layout.tensor)}"
            )
    if uneven_keys(model, layout.tensor):
        yield (
            f"tensor={layout.tensor} neither divides kv_heads={model.kv_heads} of {model.name} nor is a multiple "
            f"of it; use one of {divisors_text(model.kv_heads, near=layout.tensor)}"
        )


def _sequence(layout: Layout, model: Transformer) -> Iterator[str]:
    if uneven_sequence(model, layout.context):
        yield f"context={layout.context} does not divide seq={model.seq} of {model.name}; use a power of 2"
    elif layout.sequence_parallel and uneven_part(model, layout.context, layout.tensor):
        yield (
            f"tensor={layout.tensor} does not divide the {model.seq // layout.context} tokens per rank, as "
            "sequence_parallel=True requires; use a different tensor or context degree, or sequence_parallel=False"
        )


def _stages(layout: Layout, layers: int, name: str) -> Iterator[str]:
    stages = layout.pipeline * layout.virtual_stages
    if too_many_stages(layers, layout.pipeline, layout.virtual_stages):
        yield (
            f"pipeline={layout.pipeline} x virtual_stages={layout.virtual_stages} = {stages} stages are more than the "
            f"{layers} layers of {name}; use at most {layers}"
        )


def _experts(layout: Layout, model: Transformer) -> Iterator[str]:
    if not uneven_experts(model, layout.expert):
        return
    if model.mixture is None:
        yield f"expert={layout.expert}, but {model.name} has no experts; use expert=1"
    else:
        yield (
            f"expert={layout.expert} does not divide mixture.experts={model.mixture.experts} of {model.name}; "
            f"use one of {divisors_text(model.mixture.experts, near=layout.expert)}"
        )


Numbers = Any
"""A number, or an array of numbers. This module uses only operators that both support, so it needs no NumPy."""
Broken = Any
"""Whether a rule is broken: a bool, or an array of bools."""


def indivisible(size: Numbers, parts: Numbers) -> Broken:
    """Return whether `size` is not divisible by `parts`."""
    return size % parts != 0


def tensor_sizes(model: Transformer) -> dict[str, int]:
    """Return the sizes that must be divisible by the tensor-parallel degree, by name: head count and inner widths."""
    sizes = {"heads": model.heads, "ffn": model.ffn}
    return sizes if model.mixture is None else {**sizes, "mixture.ffn": model.mixture.ffn}


def uneven_keys(model: Transformer, tensor: Numbers) -> Broken:
    """Return whether the tensor-parallel degree neither divides the key-value head count nor is a multiple of it."""
    return indivisible(model.kv_heads, tensor) & indivisible(tensor, model.kv_heads)


def uneven_batch(global_batch: int, data: Numbers, micro_batch: Numbers = 1) -> Broken:
    """Return whether the global batch is not a multiple of replicas x micro-batch."""
    return indivisible(global_batch, data * micro_batch)


def uneven_sequence(model: Transformer, context: Numbers) -> Broken:
    """Return whether the sequence length is not divisible by the context-parallel degree."""
    return indivisible(model.seq, context)


def uneven_halves(tokens: int, context: int) -> bool:
    """Return whether tokens cannot be divided into 2 x `context` equal parts, an early and a late one per rank."""
    return context > 1 and tokens % (2 * context) != 0


def uneven_part(model: Transformer, context: Numbers, tensor: Numbers) -> Broken:
    """Return whether a context rank's part of the sequence is not divisible by the tensor-parallel degree.

    Sequence parallelism requires divisibility.
    """
    return indivisible(model.seq // context, tensor)


def uneven_experts(model: Transformer, expert: Numbers) -> Broken:
    """Return whether the number of experts is not divisible by the expert-parallel degree.

    A model without experts requires degree 1.
    """
    return expert > 1 if model.mixture is None else indivisible(model.mixture.experts, expert)


def too_many_stages(layers: int, pipeline: Numbers, virtual_stages: Numbers = 1) -> Broken:
    """Return whether there are more stages than layers."""
    return pipeline * virtual_stages > layers


def uneven_chunks(layers: int, pipeline: Numbers, virtual_stages: int) -> Broken:
    """Return whether virtual stages would have unequal numbers of layers, a case without a closed form."""
    return indivisible(layers, pipeline * virtual_stages) & (virtual_stages > 1)


def uneven_rounds(schedule: PipelineSchedule, pipeline: Numbers, microbatches: Numbers) -> Broken:
    """Return whether the number of micro-batches is not a multiple of the number of ranks, although it must be.

    Schedules that allow any number of stages per rank require a multiple.
    """
    return indivisible(microbatches, pipeline) & (schedule.most_stages is None)


def too_few_microbatches(schedule: PipelineSchedule, pipeline: Numbers, microbatches: Numbers) -> Broken:
    """Return whether there are fewer micro-batches per rank than the schedule needs."""
    return microbatches < schedule.least_per_rank * pipeline
