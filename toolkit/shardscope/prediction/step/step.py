"""Step time of many layouts at once: tables for the few combinations that occur, then a few sums for every row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import device_memory
from shardscope.analytic.memory.offload import OFFLOADS_OPTIMIZER, host_room
from shardscope.analytic.schedules.closed import bubble_time, columns
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.parts import StepParts
from shardscope.prediction.step.tables import Table, micro_table, state_table
from shardscope.prediction.step.windows import Columns, Rows, Windows, drag_of, host_update, windows
from shardscope.spec.calibration import Calibration
from shardscope.spec.cluster import Cluster
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]

CHUNK = 1 << 14
"""Rows worked on at a time: a dozen columns of so many stay in a core's cache."""


def even_time(
    model: Transformer,
    layouts: Layouts,
    cluster: Cluster,
    calibration: Calibration,
    *,
    drive_share: Floats | None = None,
    pace: Floats | float = 1.0,
) -> StepParts:
    """Seconds of one optimizer step for every layout, of a pipeline whose stages all have ceil(L / p) layers.

    With m micro-batches, a step is m times the slowest stage's micro-batch, the bubble, messages between stages,
    what of the gradients' reduction is not hidden, and the update. All of it follows from the model's sizes, the
    catalogue's rates and the calibration's constants. More bandwidth of any kind never makes it longer.

    Args:
        model: What is trained.
        layouts: One layout or a million.
        cluster: Its links, host and drives.
        calibration: The machine's constants.
        drive_share: `MemoryParts.drive_share` of each layout where it is known; None to count it.
        pace: Of each layout, what its stages take over what such a stage takes; see `uneven`.
    """
    work = _work(model, layouts, cluster, calibration, drive_share)
    work = work._replace(pace=np.broadcast_to(np.asarray(pace, float), len(layouts)))
    parts = StepParts(*np.empty((len(StepParts._fields), len(layouts))))
    for rows in _in_cache(layouts):
        _fill(parts, rows, work)
    return parts


def stage_time(model: Transformer, layouts: Layouts, cluster: Cluster, calibration: Calibration) -> Floats:
    """Seconds of one micro-batch through a stage of ceil(L / p) layers, both ways, with all that it waits for."""
    work = _work(model, layouts, cluster, calibration, None)
    passes = (_passes(work, rows) for rows in _in_cache(layouts))
    return np.concatenate([each.forward + each.backward for each in passes])


def _in_cache(layouts: Layouts) -> Iterator[slice]:
    """The rows in slices."""
    return (slice(start, start + CHUNK) for start in range(0, len(layouts), CHUNK))


def _work(
    model: Transformer,
    layouts: Layouts,
    cluster: Cluster,
    calibration: Calibration,
    drive_share: Floats | None,
) -> _Work:
    machine = Machine.of(cluster, calibration, layouts.precision)
    if drive_share is None:
        drive_share = _drive_share(model, layouts, cluster)
    return _Work(
        layouts=layouts,
        micro=micro_table(model, machine, layouts),
        states=state_table(model, machine, layouts),
        calibration=calibration,
        per_node=cluster.per_node if cluster.nodes > 1 else 1 << 62,
        drag=np.broadcast_to(drag_of(cluster, drive_share), len(layouts)),
        pace=np.ones(1),
    )


def _drive_share(model: Transformer, layouts: Layouts, cluster: Cluster) -> Floats:
    """Of what each layout offloads, the share that its host cannot hold."""
    if not (cluster.nvme_bandwidth and layouts.offload.any()):
        return np.zeros(1)
    return device_memory(model, layouts, host_capacity=host_room(cluster)).drive_share


class _Work(NamedTuple):
    layouts: Layouts
    micro: Table
    states: Table
    calibration: Calibration
    per_node: int
    """Devices that hold a whole layout without crossing to another node; endless where there is one node."""
    drag: Floats
    """Of every row; see `windows.drag_of`."""
    pace: Floats
    """Of every row; see `even_time`."""


class _Passes(NamedTuple):
    """One micro-batch through the slowest stage, waits included."""

    found: Rows
    late: Windows
    forward: Floats
    backward: Floats


def _passes(work: _Work, rows: slice) -> _Passes:
    layouts, micro, states = work.layouts, work.micro.take(rows), work.states.take(rows)
    found = Rows(
        layouts.zero[rows], layouts.offload[rows], layouts.recompute[rows], micro, states, work.drag[rows]
    )
    late = windows(found, work.calibration.shard_overlap)
    backward = micro["input"] + micro["weight"] + late.backward.total
    return _Passes(found, late, micro["forward"] + late.forward.total, backward)


def _fill(parts: StepParts, rows: slice, work: _Work) -> None:
    layouts, cal = work.layouts, work.calibration
    found, late, forward, backward = _passes(work, rows)
    one, held, pace = found.micro, found.states, work.pace[rows]
    stages, count = layouts.pipeline[rows], layouts.num_micro_batches[rows]
    virtual, schedule = layouts.virtual_stages[rows], layouts.schedule[rows]
    paced, forward, backward, weight = count * pace, forward * pace, backward * pace, one["weight"] * pace
    for name, column in (
        ("compute", "compute"),
        ("recompute", "recompute"),
        ("tensor_comm", "tensor"),
        ("context_comm", "context"),
        ("expert_comm", "expert"),
        ("overhead", "waiting"),
    ):
        np.multiply(paced, one[column], out=getattr(parts, name)[rows])
    parts.overhead[rows] += cal.step_s
    edge = count * _edge_left(one, forward + backward)
    parts.compute[rows] += edge * one["edge compute"]
    parts.tensor_comm[rows] += edge * one["edge tensor"]
    parts.bubble[rows] = bubble_time(schedule, stages, count, virtual, forward, backward - weight, weight)
    devices = layouts.tensor[rows] * layouts.context[rows] * layouts.data[rows] * stages
    hop = np.where(devices > work.per_node, one["far hop"], one["near hop"])
    parts.pipeline_comm[rows] = hop * (2.0 * (count * virtual + stages - 1))
    tied = np.where(columns().v_shaped[schedule], 0.0, held["tied_s"])
    each = late.forward.network + late.backward.network
    parts.data_comm[rows] = paced * each + _once(found, late.free * pace, cal) + tied
    _offload(parts, rows, found, paced * (late.forward.host + late.backward.host))
    total = parts.total[rows]
    np.add(parts.compute[rows], parts.recompute[rows], out=total)
    for part in parts[2:-1]:
        total += part[rows]


def _edge_left(one: Columns, pace: Floats) -> Floats:
    """Of embedding and projection, the share that goes beyond the time that a last stage with fewer layers has."""
    whole = np.maximum(one["edge"], np.finfo(float).tiny)
    return np.clip(1.0 - pace * one["spare"] / whole, 0.0, 1.0)


def _once(rows: Rows, free: Floats, cal: Calibration) -> Floats:
    """What is reduced or gathered once a step, less what hides behind the last backward pass, and packing it.

    ZeRO 0 and 1 reduce gradients once, at the end, and pack them then; 1 and 2 gather parameters once.
    """
    zero, held = rows.zero, rows.states
    once = np.where(zero == 3, 0.0, held["gather_s"]) + np.where(zero < 2, held["reduce_s"], 0.0)
    packed = np.where(zero < 2, held["codec_s"], 0.0)
    return np.asarray(once - np.minimum(once * cal.gradient_overlap, free) + packed)


def _offload(parts: StepParts, rows: slice, found: Rows, late: Floats) -> None:
    """The update where the optimizer's state is, and the traffic to the host that a pass waits for."""
    if not found.offload.any():
        parts.optimizer[rows], parts.offload[rows] = found.states["update_s"], 0.0
        return
    on_host = OFFLOADS_OPTIMIZER[found.offload]
    parts.optimizer[rows] = np.where(on_host, found.states["products_s"], found.states["update_s"])
    parts.offload[rows] = np.where(on_host, host_update(found), 0.0) + late
