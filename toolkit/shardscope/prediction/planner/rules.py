"""Feasibility constraints of layouts over arrays; the conditions are those of `spec.layout_rules`.

Rules are checked in the order of `REASONS`, and a layout is rejected for the first rule that it breaks, so that the
counts by reason add up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.spec import layout_rules
from shardscope.spec.cluster import Cluster
from shardscope.spec.model import Transformer
from shardscope.spec.pipeline_schedule import PipelineSchedule

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

REASONS: dict[str, str] = {
    "devices": "tensor x pipeline x context does not divide the number of devices",
    "data": "the replicas that are left are not among those asked for",
    "heads": "the tensor degree does not divide the attention heads",
    "kv-heads": "the tensor degree and the heads of keys and values do not divide one another",
    "ffn": "the tensor degree does not divide the width of the feed-forward layer",
    "layers": "there are more stages than layers",
    "sequence": "the context degree does not divide the sequence",
    "experts": "the expert degree does not divide the experts and the replicas",
    "batch": "the replicas do not divide the global batch",
    "micro-batch": "the micro-batch does not divide a replica's part of the batch",
    "schedule": "the schedule needs more stages, micro-batches or layers, or layers that divide",
    "no pipeline": "without a pipeline all schedules are the same; counted once",
    "sequence-parallel": "sequence parallelism needs tensor ranks that divide a rank's part of the sequence",
    "no replicas": "with nothing to shard, share or compress it is the same as another; counted once",
    "no recomputation": "flash attention keeps nothing that selective recomputation could drop; counted once",
    "does not fit": "its fullest device, or the host behind it, holds more than there is memory",
    "beaten": "as many others as were asked for are faster and leave more memory free",
}
"""Reason codes and their meaning, in the order in which the rules are checked."""


class Grid(NamedTuple):
    """Parallel degrees, one array each."""

    tensor: Ints
    pipeline: Ints
    context: Ints
    expert: Ints
    data: Ints


def grid_faults(
    model: Transformer, grid: Grid, *, devices: int, batch: int, data: tuple[int, ...] | None
) -> Ints:
    """Index into `REASONS` of the first rule that each grid breaks, or -1."""
    tensor, pipeline, context, expert, replicas = grid
    uneven = {
        name: layout_rules.indivisible(size, tensor)
        for name, size in layout_rules.tensor_sizes(model).items()
    }
    experts = layout_rules.uneven_experts(model, expert)
    return first_fault(
        {
            "devices": layout_rules.indivisible(devices, tensor * pipeline * context),
            "data": np.zeros(1, bool) if data is None else ~np.isin(replicas, data),
            "heads": uneven.pop("heads"),
            "kv-heads": layout_rules.uneven_keys(model, tensor),
            "ffn": np.logical_or.reduce(list(uneven.values())),
            "layers": layout_rules.too_many_stages(model.layers, pipeline),
            "sequence": layout_rules.uneven_sequence(model, context),
            "experts": experts | layout_rules.indivisible(replicas * context, expert),
            "batch": layout_rules.uneven_batch(batch, replicas),
        },
        len(tensor),
    )


def first_fault(rules: dict[str, Mask], length: int) -> Ints:
    """Index into `REASONS` of the first rule broken, or -1."""
    codes = list(REASONS)
    found = np.full(length, -1, np.int64)
    for name in reversed(rules):
        found[np.broadcast_to(rules[name], (length,))] = codes.index(name)
    return found


def schedule_faults(
    name: str, virtual: int, *, layers: int, stages: Ints, microbatches: Ints, is_first: bool
) -> dict[str, Mask]:
    """Masks of the rules that a schedule breaks on a pipeline with the given number of stages."""
    alone, schedule = stages == 1, PipelineSchedule(name)
    broken = (
        layout_rules.too_many_stages(layers, stages, virtual)
        | layout_rules.uneven_chunks(layers, stages, virtual)
        | layout_rules.uneven_rounds(schedule, stages, microbatches)
        | layout_rules.too_few_microbatches(schedule, stages, microbatches)
    )
    return {"schedule": ~alone & broken, "no pipeline": alone & (not is_first)}


def shard_size(cluster: Cluster, kind: str, grid: Grid) -> Ints:
    """Ranks over which ZeRO partitions: all replicas, or those that share a node."""
    ranks = grid.data * grid.context
    if kind == "all":
        return ranks
    return np.asarray(np.maximum(1, np.gcd(ranks, np.maximum(1, cluster.per_node // grid.tensor))))
