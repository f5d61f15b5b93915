"""Validity rules for arrays of layouts; the conditions come from `spec.layout_rules`.

Rules are checked in the order of `REASONS`. A rejected layout counts only for the first rule that it breaks, so the
counts add up to the number of rejected layouts.
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
    "data": "the resulting number of replicas is not among the allowed values of data",
    "heads": "the tensor degree does not divide the number of attention heads",
    "kv-heads": "neither the tensor degree nor the number of key-value heads divides the other",
    "ffn": "the tensor degree does not divide the width of the feed-forward layer",
    "layers": "there are more stages than layers",
    "sequence": "the context degree does not divide the sequence length",
    "experts": "the expert degree does not divide both the experts and the replicas",
    "batch": "the number of replicas does not divide the global batch",
    "micro-batch": "the micro-batch does not divide a replica's share of the batch",
    "schedule": "the schedule needs more stages, micro-batches or layers, or layers that split evenly",
    "no pipeline": "without a pipeline all schedules are equivalent; only one is kept",
    "sequence-parallel": "sequence parallelism needs a tensor degree above 1 that divides a rank's sequence",
    "ZeRO in a pipeline": "zero_in_pipelines leaves out this ZeRO stage with several pipeline stages",
    "ZeRO with offload": "zero_for_offload leaves out this ZeRO stage with this kind of offloading",
    "recomputation with offload": "full_for_offload leaves out this offloading unless all layers are recomputed",
    "no replicas": "without replicas or sharding it is equivalent to another layout; only one is kept",
    "no recomputation": "flash attention saves nothing that selective recomputation could drop; only one is kept",
    "recompute-layers": "it recomputes as many layers as another layout; only one is kept",
    "no job": "on an emulated cluster, no job has these settings together; `ss.Job(layout=...)` says why",
    "does not fit": "it needs more memory than the device, or the host and its drives, have",
    "not timed": "its job was not predicted: a formula ranks it lower, or a smaller job with its degrees does not fit",
    "beaten": "enough other layouts are faster and leave more memory free (see `top` of `ss.plan`)",
}
"""Reason codes and their meaning, in the order in which the rules are checked."""


class Grid(NamedTuple):
    """Degrees of parallelism, one array each."""

    tensor: Ints
    pipeline: Ints
    context: Ints
    expert: Ints
    data: Ints


def grid_faults(
    model: Transformer, grid: Grid, *, devices: int, batch: int, data: tuple[int, ...] | None
) -> Ints:
    """For each grid, return the index into `REASONS` of the first rule that it breaks; -1 if it breaks no rule."""
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
    """For each row, return the index into `REASONS` of the first rule that it breaks; -1 if it breaks no rule."""
    codes = list(REASONS)
    found = np.full(length, -1, np.int64)
    for name in reversed(rules):
        found[np.broadcast_to(rules[name], (length,))] = codes.index(name)
    return found


def schedule_faults(
    name: str, virtual: int, *, layers: int, stages: Ints, microbatches: Ints, is_first: bool
) -> dict[str, Mask]:
    """For each rule, return a mask of the rows whose stages or micro-batches break the rule under this schedule."""
    alone, schedule = stages == 1, PipelineSchedule(name)
    broken = (
        layout_rules.too_many_stages(layers, stages, virtual)
        | layout_rules.uneven_chunks(layers, stages, virtual)
        | layout_rules.uneven_rounds(schedule, stages, microbatches)
        | layout_rules.too_few_microbatches(schedule, stages, microbatches)
    )
    return {"schedule": ~alone & broken, "no pipeline": alone & (not is_first)}


def shard_size(cluster: Cluster, kind: str, grid: Grid) -> Ints:
    """Return the number of ranks over which ZeRO shards model states: all replicas, or the replicas on one node."""
    ranks = grid.data * grid.context
    if kind == "all":
        return ranks
    return np.asarray(np.maximum(1, np.gcd(ranks, np.maximum(1, cluster.per_node // grid.tensor))))
