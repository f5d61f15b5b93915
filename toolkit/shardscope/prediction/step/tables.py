"""What a search looks up: seconds of one micro-batch and of the model states, for the few combinations that occur."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.compute.matmul import Split
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import RECIPES, activation_bytes_per_layer
from shardscope.analytic.memory.frameworks import MEGATRON_CORE
from shardscope.prediction.step.distinct import Distinct
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.micro import Stage, stage
from shardscope.prediction.step.shards import Weights, weights
from shardscope.spec.layout import RECOMPUTE_NAMES
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]


class Taken(dict[str, Floats]):
    """Columns of some rows, each looked up when it is first asked for."""

    def __init__(self, columns: dict[str, Floats], index: npt.NDArray[np.intp]) -> None:
        super().__init__()
        self._columns, self._index = columns, index

    def __missing__(self, name: str) -> Floats:
        column = self._columns[name]
        self[name] = column if column.size == 1 else column.take(self._index, mode="clip")
        return self[name]


class Table(NamedTuple):
    """Columns of seconds for each combination, and each row's combination."""

    row: npt.NDArray[np.intp]
    columns: dict[str, Floats]

    @classmethod
    def of(cls, row: npt.NDArray[np.intp], columns: dict[str, Floats]) -> Table:
        """Columns that hold one value everywhere are kept as that value: nothing to look up."""
        kept = {
            name: column if column.min() != column.max() else column[:1] for name, column in columns.items()
        }
        return cls(row, kept)

    def take(self, rows: slice) -> Taken:
        return Taken(self.columns, self.row[rows])


def micro_table(model: Transformer, machine: Machine, layouts: Layouts) -> Table:
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
    return Table.of(found.row, _micro_columns(times, hops, saved / cluster.device.host_bandwidth))


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


def _micro_columns(times: Stage, hops: list[Floats], saved: Floats) -> dict[str, Floats]:
    f, b, r, e = times.forward, times.backward, times.recompute, times.edge
    return {
        "compute": f.compute + b.compute,
        "recompute": r.compute,
        "tensor": f.tensor + b.tensor + r.tensor,
        "context": f.context + b.context + r.context,
        "expert": f.expert + b.expert + r.expert,
        "waiting": f.waiting + b.waiting + r.waiting,
        "forward": f.total,
        "weight": b.weight,
        "input": b.total - b.weight + r.total,
        "edge": e.total,
        "edge compute": e.compute,
        "edge tensor": e.tensor,
        "spare": times.spare,
        "near hop": hops[0],
        "far hop": hops[1],
        "saved": saved,
    }


def state_table(model: Transformer, machine: Machine, layouts: Layouts) -> Table:
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
        shard=shard, zero=zero, compression=found.columns[-1], compressions=layouts.compressions,
        precision=layouts.precision, kept=layouts.optimizer.states,
    )  # fmt: skip
    return Table.of(found.row, _state_columns(states))


def _state_columns(states: Weights) -> dict[str, Floats]:
    return {name: column for name, column in states._asdict().items() if name.endswith("_s")}
