"""When a layout cannot be, as conditions over numbers, or over whole columns of them: each rule once.

`layout_rules` tells the one layout that breaks a rule what to do; the planner counts how many of a million break it.
Both ask here. Arguments are numbers or arrays that broadcast; so is what comes back: whether the rule is broken.
"""

from __future__ import annotations

from typing import Any

from shardscope.spec.model import Transformer
from shardscope.spec.pipeline_schedule import PipelineSchedule

Numbers = Any
"""A number, or an array of them: this floor knows no arrays, only what they share with numbers."""
Broken = Any
"""True or False, or an array of them."""


def indivisible(size: Numbers, parts: Numbers) -> Broken:
    """`parts` do not divide `size`."""
    return size % parts != 0


def tensor_sizes(model: Transformer) -> dict[str, int]:
    """What the tensor degree divides, by name: heads, and every inner width."""
    sizes = {"heads": model.heads, "ffn": model.ffn}
    return sizes if model.mixture is None else {**sizes, "mixture.ffn": model.mixture.ffn}


def uneven_keys(model: Transformer, tensor: Numbers) -> Broken:
    """The tensor degree neither divides the heads of keys and values nor is their multiple."""
    return indivisible(model.kv_heads, tensor) & indivisible(tensor, model.kv_heads)


def uneven_batch(global_batch: int, data: Numbers, micro_batch: Numbers = 1) -> Broken:
    """The batch is not a multiple of replicas x micro-batch."""
    return indivisible(global_batch, data * micro_batch)


def uneven_sequence(model: Transformer, context: Numbers) -> Broken:
    """The context degree does not divide the sequence."""
    return indivisible(model.seq, context)


def uneven_part(model: Transformer, context: Numbers, tensor: Numbers) -> Broken:
    """The tensor degree does not divide a context rank's part of the sequence, which sequence parallelism needs."""
    return indivisible(model.seq // context, tensor)


def uneven_experts(model: Transformer, expert: Numbers) -> Broken:
    """The expert degree does not divide the experts; without experts it can only be 1."""
    return expert > 1 if model.mixture is None else indivisible(model.mixture.experts, expert)


def too_many_stages(layers: int, pipeline: Numbers, virtual_stages: Numbers = 1) -> Broken:
    """There are more stages than layers."""
    return pipeline * virtual_stages > layers


def uneven_chunks(layers: int, pipeline: Numbers, virtual_stages: int) -> Broken:
    """A rank's stages differ in layers, which no closed form knows; without virtual stages they may."""
    return indivisible(layers, pipeline * virtual_stages) & (virtual_stages > 1)


def uneven_rounds(schedule: PipelineSchedule, pipeline: Numbers, microbatches: Numbers) -> Broken:
    """A schedule of any number of stages a rank takes micro-batches in rounds of as many as there are ranks."""
    return indivisible(microbatches, pipeline) & (schedule.most_stages is None)


def too_few_microbatches(schedule: PipelineSchedule, pipeline: Numbers, microbatches: Numbers) -> Broken:
    """There are fewer for each rank than the schedule needs."""
    return microbatches < schedule.least_per_rank * pipeline
