"""When a layout cannot be, as conditions over numbers, or over whole columns of them: each rule once.

`layout_rules` tells the one layout that breaks a rule what to do; the planner counts how many of a million break it.
Both ask here. Arguments are numbers or arrays that broadcast; so is what comes back: whether the rule is broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardscope.spec.model import Transformer

Numbers = Any
"""A number, or an array of them: this floor knows no arrays, only what they share with numbers."""
Broken = Any
"""True or False, or an array of them."""


@dataclass(frozen=True)
class StagesARank:
    """How many stages a rank of a schedule may hold."""

    least: int
    most: int | None


STAGES_A_RANK: dict[str, StagesARank] = {
    "gpipe": StagesARank(1, 1),
    "1f1b": StagesARank(1, 1),
    "interleaved": StagesARank(2, None),
    "zero-bubble": StagesARank(2, None),
    "zb-h1": StagesARank(1, 1),
    "zb-h2": StagesARank(1, 1),
    "zbv": StagesARank(2, 2),
    "v-half": StagesARank(2, 2),
    "v-min": StagesARank(2, 2),
    "dualpipev": StagesARank(2, 2),
}
"""Of every schedule in `spec.layout.SCHEDULE_NAMES`."""
CHUNKED = tuple(name for name, stages in STAGES_A_RANK.items() if stages.most is None)
"""Schedules that look at `virtual_stages`."""
V_SHAPED = tuple(name for name, stages in STAGES_A_RANK.items() if stages.least == stages.most == 2)
"""Schedules that run down the ranks and back up: each rank holds two stages, the first one also the last."""


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
    """The batch is no multiple of replicas x micro-batch."""
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


def uneven_rounds(schedule: str, pipeline: Numbers, microbatches: Numbers) -> Broken:
    """An interleaved schedule takes micro-batches in rounds of as many as there are ranks."""
    return indivisible(microbatches, pipeline) & (schedule in CHUNKED)


def too_few_microbatches(schedule: str, pipeline: Numbers, microbatches: Numbers) -> Broken:
    """DualPipeV needs two micro-batches a rank."""
    return (microbatches < 2 * pipeline) & (schedule == "dualpipev")
