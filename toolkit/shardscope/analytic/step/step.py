"""Step time of many layouts at once: tables for the few combinations that occur, then a few sums for every row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.compute.matmul import Split
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import RECIPES, activation_bytes_per_layer
from shardscope.analytic.memory.frameworks import MEGATRON_CORE
from shardscope.analytic.schedules.closed import bubble_time
from shardscope.analytic.step.distinct import Distinct
from shardscope.analytic.step.machine import Machine
from shardscope.analytic.step.micro import Stage, stage
from shardscope.analytic.step.parts import StepParts
from shardscope.analytic.step.shards import Weights, weights
from shardscope.spec.calibration import Calibration
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import RECOMPUTE_NAMES
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]

CHUNK = 1 << 14
"""Rows worked on at a time: a dozen columns of so many stay in a core's cache."""


def step_time(model: Transformer, layouts: Layouts, cluster: Cluster, calibration: Calibration) -> StepParts:
    """Seconds of one optimizer step for every layout.

    With m micro-batches, a step is m times the slowest stage's micro-batch, the bubble, messages between stages,
    what of the gradients' reduction is not hidden, and the update. All of it follows from the model's sizes, the
    catalogue's rates and the calibration's constants.

    Example:
        >>> parts = step_time(model, Layouts.of([layout]), cluster, calibration)  # doctest: +SKIP
        >>> float(parts.total[0])  # doctest: +SKIP
    """
    machine = Machine.of(cluster, calibration, layouts.precision)
    micro = _micro_table(model, machine, layouts)
    states = _state_table(model, machine, layouts)
    parts = StepParts(*np.empty((len(StepParts._fields), len(layouts))))
    per_node = cluster.per_node if cluster.nodes > 1 else 1 << 62
    work = _Work(layouts, micro, states, calibration, per_node)
    for start in range(0, len(layouts), CHUNK):
        _fill(parts, slice(start, start + CHUNK), work)
    return parts


class _Table(NamedTuple):
    """Columns of seconds for each combination, and each row's combination."""

    row: npt.NDArray[np.intp]
    columns: dict[str, Floats]

    @classmethod
    def of(cls, row: npt.NDArray[np.intp], columns: dict[str, Floats]) -> _Table:
        """Columns that hold one value everywhere are kept as that value: nothing to look up."""
        kept = {
            name: column if column.min() != column.max() else column[:1] for name, column in columns.items()
        }
        return cls(row, kept)

    def take(self, rows: slice) -> dict[str, Floats]:
        index = self.row[rows]
        return {
            name: column if column.size == 1 else column.take(index, mode="clip")
            for name, column in self.columns.items()
        }


class _Work(NamedTuple):
    layouts: Layouts
    micro: _Table
    states: _Table
    calibration: Calibration
    per_node: int
    """Devices that hold a whole layout without crossing to another node; endless where there is one node."""


def _micro_table(model: Transformer, machine: Machine, layouts: Layouts) -> _Table:
    """What one micro-batch takes, for each (tensor, micro-batch, context, expert, recomputation, ...)."""
    found = Distinct.of(
        layouts.tensor, layouts.micro_batch, layouts.context, layouts.expert, layouts.pipeline,
        layouts.recompute, layouts.sequence_parallel,
    )  # fmt: skip
    tensor, micro_batch, context, expert, pipeline, recompute, sequence = found.columns
    split = Split.of(tensor=tensor, micro_batch=micro_batch, context=context, expert=expert)
    times = stage(
        model, machine, split, pipeline=pipeline, recompute=recompute, sequence_parallel=sequence,
        flash=layouts.flash_attention,
    )  # fmt: skip
    tokens = split.tokens(model.seq)
    message = tokens * model.hidden * machine.value_bytes / split.tensor
    cal, cluster = machine.calibration, machine.cluster
    sent = np.where(pipeline > 1, message / cal.pipeline_efficiency, 0.0)
    started = np.where(pipeline > 1, cal.collective_s, 0.0)
    hops = [sent / link.bandwidth + started for link in (cluster.intra, cluster.inter)]
    saved = _saved_bytes(
        model, layouts, split, pipeline=pipeline, recompute=recompute, sequence_parallel=sequence
    )
    return _Table.of(found.row, _micro_columns(times, hops, 2 * saved / cluster.device.host_bandwidth))


def _saved_bytes(
    model: Transformer,
    layouts: Layouts,
    split: Split,
    *,
    pipeline: npt.ArrayLike,
    recompute: npt.ArrayLike,
    sequence_parallel: npt.ArrayLike,
) -> Floats:
    """Bytes that the largest stage saves of one micro-batch, as memory counts them: they travel if offloaded."""
    layers = np.ceil(model.layers / np.asarray(pipeline))
    routed = np.minimum(layers, model.num_mixture_layers)
    saved = np.zeros(np.shape(split.tensor))
    for count, mixed in ((layers - routed, False), (routed, True)):
        for index, kind in enumerate(RECOMPUTE_NAMES):
            here = count * (np.asarray(recompute) == index)
            if not np.any(here):
                continue
            saved += here * activation_bytes_per_layer(
                model, micro_batch=split.micro_batch, tensor=split.tensor, context=split.context,
                sequence_parallel=sequence_parallel, recompute=kind, flash_attention=layouts.flash_attention,
                mixed=mixed, recipe=RECIPES[layouts.precision], framework=MEGATRON_CORE,
            )  # fmt: skip
    return saved


def _micro_columns(times: Stage, hops: list[Floats], swap: Floats) -> dict[str, Floats]:
    f, b, r, e = times.forward, times.backward, times.recompute, times.edge
    return {
        "compute": f.compute + b.compute + e.compute,
        "recompute": r.compute,
        "tensor": f.tensor + b.tensor + r.tensor + e.tensor,
        "context": f.context + b.context + r.context,
        "expert": f.expert + b.expert + r.expert,
        "waiting": f.waiting + b.waiting + r.waiting,
        "forward": f.total,
        "weight": b.weight,
        "input": b.total - b.weight + r.total,
        "near hop": hops[0],
        "far hop": hops[1],
        "swap": swap,
    }


def _state_table(model: Transformer, machine: Machine, layouts: Layouts) -> _Table:
    """What model states take, for each (tensor, pipeline, data, ZeRO, ...)."""
    found = Distinct.of(
        layouts.tensor, layouts.pipeline, layouts.context, layouts.expert, layouts.data, layouts.shard,
        layouts.zero, layouts.compression,
    )  # fmt: skip
    tensor, pipeline, context, expert, data, shard, zero = (
        np.asarray(column, float) for column in found.columns[:-1]
    )
    states = weights(
        model, machine, tensor=tensor, pipeline=pipeline, context=context, expert=expert, data=data,
        shard=shard, zero=zero, compression=found.columns[-1], precision=layouts.precision,
        optimizer=layouts.optimizer,
    )  # fmt: skip
    return _Table.of(found.row, _state_columns(states))


def _state_columns(states: Weights) -> dict[str, Floats]:
    return {name: column for name, column in states._asdict().items() if name.endswith("_s")}


def _fill(parts: StepParts, rows: slice, work: _Work) -> None:
    layouts, micro, states, cal, per_node = work
    one, held = micro.take(rows), states.take(rows)
    stages, count = layouts.pipeline[rows], layouts.num_microbatches[rows]
    virtual = layouts.virtual_stages[rows]
    for name, column in zip(
        ("compute", "recompute", "tensor_comm", "context_comm", "expert_comm"),
        ("compute", "recompute", "tensor", "context", "expert"),
        strict=True,
    ):
        np.multiply(count, one[column], out=getattr(parts, name)[rows])
    np.multiply(count, one["waiting"], out=parts.overhead[rows])
    parts.overhead[rows] += cal.step_s
    parts.bubble[rows] = bubble_time(
        layouts.schedule[rows], stages, count, virtual, one["forward"], one["input"], one["weight"]
    )
    devices = layouts.tensor[rows] * layouts.context[rows] * layouts.data[rows] * stages
    hop = np.where(devices > per_node, one["far hop"], one["near hop"])
    parts.pipeline_comm[rows] = hop * (2.0 * (count * virtual + stages - 1))
    back = one["input"] + one["weight"]
    parts.data_comm[rows] = _exposed(layouts.zero[rows], count, held, (one["forward"] + back, back), cal)
    _offload(parts, rows, layouts, (one, held))
    total = parts.total[rows]
    np.add(parts.compute[rows], parts.recompute[rows], out=total)
    for part in parts[2:-1]:
        total += part[rows]


def _offload(
    parts: StepParts, rows: slice, layouts: Layouts, columns: tuple[dict[str, Floats], dict[str, Floats]]
) -> None:
    """The update where the optimizer's state is, and the traffic to the host that computation does not hide."""
    one, held = columns
    offload = layouts.offload[rows]
    if not offload.any():
        parts.optimizer[rows], parts.offload[rows] = held["update_s"], 0.0
        return
    on_host = (offload == 1) | (offload == 2) | (offload == 4)
    parts.optimizer[rows] = np.where(on_host, 0.0, held["update_s"])
    streamed = np.where((offload == 2) | (offload == 4), 2.0 * held["stream_s"], 0.0)
    swapped = np.where(offload >= 3, one["swap"], 0.0)
    busy = one["forward"] + one["input"] + one["weight"]
    late = layouts.num_microbatches[rows] * np.maximum(streamed + swapped - busy, 0.0)
    parts.offload[rows] = np.where(on_host, held["host_s"], 0.0) + late


def _exposed(
    zero: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    held: dict[str, Floats],
    windows: tuple[Floats, Floats],
    cal: Calibration,
) -> Floats:
    """Reduction and gathering that computation does not hide, and packing what is compressed.

    ZeRO 3 gathers parameters twice and reduces gradients in every micro-batch; ZeRO 2 reduces in every one and gathers
    once; 0 and 1 reduce once, at the end. What is reduced is packed as often.
    """
    busy, back = windows
    reduce_s, gather_s = held["reduce_s"], held["gather_s"]
    each = np.where(zero == 3, 2.0 * gather_s + reduce_s, np.where(zero == 2, reduce_s, 0.0))
    hidden = np.minimum(each * cal.shard_overlap, busy)
    once = np.where(zero == 3, 0.0, np.where(zero == 2, gather_s, reduce_s + gather_s))
    hidden_once = np.minimum(once * cal.gradient_overlap, back)
    codec = held["codec_s"] * np.where(zero >= 2, count, 1)
    return np.asarray(count * (each - hidden) + once - hidden_once + codec)
