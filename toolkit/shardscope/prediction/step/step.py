"""Step times of many layouts at once: lookup tables for the combinations that occur, then a few sums per layout.

A forward or backward pass through the slowest stage takes as long as the longest of its concurrent activities:

    t' = max(t + N - min(ρ N, t) + K, H)

Here t is the time of computation and exposed messages, N the time of the collectives that gather weights and
reduce gradients, ρ the fraction of N that computation can hide, and K the time to pack compressed gradients.
H is the time of traffic between device, host and drives, which ZeRO-Infinity overlaps with both computation
and collectives (Rajbhandari et al. 2021, arXiv 2104.07857, section 6.2). The result never decreases as a term
grows, so a faster link never makes a pass longer. The pipeline waits for t', so exposed time also lengthens
its bubble.

On a mixed cluster, faster devices get more layers, so that all stages of a pipeline take about the same time. The
pipeline runs through the groups in order, and each stage lies within one group. All layers are equal, so the best
contiguous split gives every stage of a group floor(T / l) layers, where l is the time of one layer on that group's
devices and T is the smallest value for which all layers are placed. A device's memory limits this number. Schedules
with several stages per rank keep the even split, because their chunks must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Ints, Layouts
from shardscope.analytic.memory.offload import (
    OFFLOADS_OPTIMIZER,
    HostTraffic,
    Offloadable,
    StepTraffic,
    step_traffic,
)
from shardscope.analytic.memory.rows import shards_gradients
from shardscope.analytic.schedules.closed import bubble_time, columns
from shardscope.calibration.calibration import Calibration
from shardscope.prediction.step.machine import Machine, memory_with, room_on
from shardscope.prediction.step.tables import LookupTable, micro_table, state_table
from shardscope.spec.cluster import Cluster
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Floats]


class StepParts(NamedTuple):
    """Time of one optimizer step on the slowest device, in seconds: one array per part, which add up to `total`."""

    compute: Floats
    """Forward and backward passes, without recomputation."""
    recompute: Floats
    """Recomputation of activations in the backward pass."""
    tensor_comm: Floats
    context_comm: Floats
    expert_comm: Floats
    pipeline_comm: Floats
    """Messages between stages."""
    bubble: Floats
    """Idle time while the pipeline fills and drains; exposed waits of micro-batches lengthen it."""
    data_comm: Floats
    """Gradient reduction and parameter gathering that computation does not hide."""
    optimizer: Floats
    offload: Floats
    """Traffic to and from the host that computation does not hide, and optimizer updates on the host."""
    overhead: Floats
    """Waits for the host to launch kernels, and the fixed cost of a step."""
    total: Floats


class Computing(NamedTuple):
    """The parts of `StepParts.compute`, in seconds, one array each."""

    forward: Floats
    backward: Floats
    edge: Floats
    """Embedding and output projection, forward and backward, minus the slack of a last stage with fewer layers."""


CHUNK = 1 << 14
"""Number of rows processed at a time; a dozen columns of this length fit in a core's cache."""


def even_time(
    model: Transformer,
    layouts: Layouts,
    cluster: Cluster,
    calibration: Calibration,
    *,
    drive_share: Floats | None = None,
    pace: Floats | float = 1.0,
    computing: Computing | None = None,
) -> StepParts:
    """Return the time of one optimizer step for every layout, in seconds, with ceil(layers / stages) layers per stage.

    With m micro-batches, a step takes m times as long as one micro-batch on the slowest stage, plus the bubble,
    messages between stages, exposed gradient reduction, and the update. Times follow from the model's sizes, the
    catalogue's rates and the calibration's constants. With the same constants, more of any resource never makes a
    step longer, with one exception: under schedules that split the backward pass, whose steps may depend little on the
    time of some passes, shorter passes leave the last stage less slack for the output projection, which can cost more
    than they save (0.25 % at most, in 2 of 4,800 draws).

    Args:
        model: The model.
        layouts: Table of layouts.
        cluster: The cluster, with its links, host and drives.
        calibration: The machine's constants.
        drive_share: `MemoryParts.drive_share` of each layout if known; None to compute it.
        pace: Stage time of each layout relative to a stage of the even split; see `cut`.
        computing: Arrays with one number per layout, to fill with the parts of `compute`; None to skip them.
    """
    work = step_work(model, layouts, cluster, calibration, drive_share)
    work = work._replace(pace=np.broadcast_to(np.asarray(pace, float), len(layouts)))
    parts = StepParts(*np.empty((len(StepParts._fields), len(layouts))))
    for rows in _in_cache(layouts):
        _fill(parts, rows, work, computing)
    return parts


def stage_time(model: Transformer, layouts: Layouts, cluster: Cluster, calibration: Calibration) -> Floats:
    """Return the time of one micro-batch in a stage of ceil(layers / stages) layers, forward and backward, in seconds.

    Waits for collectives and for host traffic are included.
    """
    work = step_work(model, layouts, cluster, calibration, None)
    passes = (_passes(work, rows) for rows in _in_cache(layouts))
    return np.concatenate([each.forward + each.backward for each in passes])


def _in_cache(layouts: Layouts) -> Iterator[slice]:
    """Yield slices of rows that fit in the cache."""
    return (slice(start, start + CHUNK) for start in range(0, len(layouts), CHUNK))


def step_work(
    model: Transformer,
    layouts: Layouts,
    cluster: Cluster,
    calibration: Calibration,
    drive_share: Floats | None,
) -> StepWork:
    """Return the lookup tables of the layouts; the arguments are the same as for `even_time`."""
    machine = Machine.of(cluster, calibration, layouts.precision)
    if drive_share is None:
        drive_share = _drive_share(model, layouts, cluster, calibration)
    return StepWork(
        layouts, micro_table(model, machine, layouts), state_table(model, machine, layouts), calibration,
        per_node=cluster.per_node if cluster.nodes > 1 else 1 << 62,
        drag=np.broadcast_to(drag_of(cluster, drive_share), len(layouts)), pace=np.ones(1),
        reduces=shards_gradients(layouts, machine.framework),
    )  # fmt: skip


def _drive_share(model: Transformer, layouts: Layouts, cluster: Cluster, calibration: Calibration) -> Floats:
    """Return the fraction of each layout's offloaded bytes that does not fit in host memory."""
    if not (cluster.nvme_bandwidth and layouts.offload.any()):
        return np.zeros(1)
    return memory_with(model, layouts, cluster, calibration.software).drive_share


class StepWork(NamedTuple):
    """Layouts, with all times that a step consists of."""

    layouts: Layouts
    micro: LookupTable
    states: LookupTable
    calibration: Calibration
    per_node: int
    """Devices that a layout can use without crossing nodes; unlimited on a single node."""
    drag: Floats
    """Time of drive traffic relative to host-link traffic, by row; see `drag_of`."""
    pace: Floats
    """Factor of the stage time, by row; see `even_time`."""
    reduces: npt.NDArray[np.bool_]
    """Whether gradients are reduced for every micro-batch, by row."""


class _Passes(NamedTuple):
    """Time of one micro-batch through the slowest stage, in seconds, including waits."""

    found: StepRows
    late: Windows
    forward: Floats
    backward: Floats
    weight: Floats
    """The part of `backward` for the weight gradients."""


def _passes(work: StepWork, rows: slice) -> _Passes:
    layouts, micro, states = work.layouts, work.micro.take(rows), work.states.take(rows)
    found = StepRows(
        layouts.zero[rows], work.reduces[rows], layouts.offload[rows], micro, states, work.drag[rows],
        columns().splits[layouts.schedule[rows]],
    )  # fmt: skip
    late = windows(found, work.calibration.shard_overlap)
    backward = micro["input"] + micro["weight"] + late.backward.total
    return _Passes(
        found, late, micro["forward"] + late.forward.total, backward, micro["weight"] + late.weight
    )


def _fill(parts: StepParts, rows: slice, work: StepWork, computing: Computing | None) -> None:
    layouts, cal = work.layouts, work.calibration
    found, late, forward, backward, weight = _passes(work, rows)
    one, held, pace = found.micro, found.states, work.pace[rows]
    stages, count = layouts.pipeline[rows], layouts.num_micro_batches[rows]
    virtual, schedule = layouts.virtual_stages[rows], layouts.schedule[rows]
    paced, forward, backward, weight = count * pace, forward * pace, backward * pace, weight * pace
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
    if computing is not None:
        computing.forward[rows] = paced * one["forward compute"]
        computing.backward[rows] = paced * one["backward compute"]
        computing.edge[rows] = edge * one["edge compute"]
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
    """Return the fraction of the time of embedding and output projection that exceeds the last stage's slack."""
    whole = np.maximum(one["edge"], np.finfo(float).tiny)
    return np.clip(1.0 - pace * one["spare"] / whole, 0.0, 1.0)


def _once(rows: StepRows, free: Floats, cal: Calibration) -> Floats:
    """Return the exposed time of collectives that run once per step, plus the time to pack gradients, in seconds.

    ZeRO 0 and 1, and FSDP2 in a pipeline, pack and reduce gradients once, at the end of the step. ZeRO 1 and 2 gather
    parameters once. Part of this time is hidden behind the last backward pass.
    """
    zero, held = rows.zero, rows.states
    once = np.where(zero == 3, 0.0, held["gather_s"]) + np.where(rows.reduces, 0.0, held["reduce_s"])
    packed = np.where(rows.reduces, 0.0, held["codec_s"])
    return np.asarray(once - np.minimum(once * cal.gradient_overlap, free) + packed)


def _offload(parts: StepParts, rows: slice, found: StepRows, late: Floats) -> None:
    """Fill in the times of the update, on device or host, and of the exposed host traffic in both passes."""
    if not found.offload.any():
        parts.optimizer[rows], parts.offload[rows] = found.states["update_s"], 0.0
        return
    on_host = OFFLOADS_OPTIMIZER[found.offload]
    parts.optimizer[rows] = np.where(on_host, found.states["products_s"], found.states["update_s"])
    parts.offload[rows] = np.where(on_host, host_update(found), 0.0) + late


SCALED = (
    "compute", "recompute", "tensor_comm", "context_comm", "expert_comm", "bubble", "data_comm", "offload", "overhead",
)  # fmt: skip
"""Parts of a step whose time, in whole or per micro-batch, is proportional to the time of the slowest stage."""
_HALVINGS = 60


class LayerSplit(NamedTuple):
    """Distribution of the layers over the cluster's groups, for each layout."""

    stages: Floats
    """Number of stages, by layout and group; all 0 if the layers are split evenly."""
    layers: Floats
    """Number of layers on the largest stage of each group, by layout and group."""
    pace: Floats
    """Time of the slowest stage relative to a stage of the even split on the slowest device; at most 1."""


def step_time(
    model: Transformer,
    layouts: Layouts,
    cluster: Cluster,
    calibration: Calibration,
    *,
    drive_share: Floats | None = None,
) -> StepParts:
    """Return the time of one optimizer step for every layout, part by part, in seconds.

    On a mixed cluster, this is the time under the best split of the layers.

    Args:
        model: The model.
        layouts: Table of layouts.
        cluster: The cluster, with its links, host and drives. If it has `groups`, its nominal device is as slow
            as the slowest group's device and has the least memory of all groups' devices.
        calibration: The machine's constants, for all groups.
        drive_share: `MemoryParts.drive_share` of each layout if known; None to compute it.

    Example:
        >>> parts = step_time(model, Layouts.of([layout]), cluster, calibration)  # doctest: +SKIP
        >>> float(parts.total[0])  # doctest: +SKIP
    """
    pace = cut(model, layouts, cluster, calibration).pace if cluster.groups else 1.0
    return even_time(model, layouts, cluster, calibration, drive_share=drive_share, pace=pace)


class StepDetail(NamedTuple):
    """Time of one step, in seconds, with the parts of `compute`, and its scale factor on a mixed cluster."""

    parts: StepParts
    computing: Computing
    pace: Floats
    """Scale factor `LayerSplit.pace`; 1 on a cluster of identical devices."""


def step_detail(
    model: Transformer, layouts: Layouts, cluster: Cluster, calibration: Calibration
) -> StepDetail:
    """Return the same times as `step_time`, together with the parts of `compute`."""
    pace = cut(model, layouts, cluster, calibration).pace if cluster.groups else np.ones(len(layouts))
    computing = Computing(*np.empty((len(Computing._fields), len(layouts))))
    parts = even_time(model, layouts, cluster, calibration, pace=pace, computing=computing)
    return StepDetail(parts, computing, pace)


def cut(
    model: Transformer,
    layouts: Layouts,
    cluster: Cluster,
    calibration: Calibration,
    *,
    of_layers: int | None = None,
) -> LayerSplit:
    """Return the best split of the layers for each layout on a cluster that has `groups`.

    Each layer is assumed to take as much memory as on the device with the highest peak under the even split.

    Args:
        model: The model.
        layouts: Table of layouts.
        cluster: The cluster.
        calibration: The machine's constants.
        of_layers: Number of layers to split, if it differs from the model's; each layer is assumed to take as much time
            and memory as the layers of `model` on average.
    """
    num_layers = of_layers or model.layers
    memory_bytes = memory_with(model, layouts, cluster, calibration.software).total
    even = np.ceil(model.layers / layouts.pipeline)
    a_stage = (layouts.data * layouts.tensor * layouts.context).astype(float)
    times, stages, most = [], [], []
    for group in cluster.groups:
        alone = cluster.replace(device=group.device, intra=group.intra, groups=())
        times.append(stage_time(model, layouts, alone, calibration) / even)
        stages.append(group.num_devices / a_stage)
        room = np.floor(room_on(alone, calibration.software) / (memory_bytes / even))
        most.append(np.ceil(room * num_layers / model.layers))
    slow = stage_time(model, layouts, cluster.replace(groups=()), calibration) / even
    time, stage, cap = (np.stack(columns, axis=1) for columns in (times, stages, most))
    can = (stage == np.floor(stage)).all(axis=1) & (layouts.virtual_stages == 1)
    stage = np.where(can[:, None], stage, 0.0)
    pace = np.where(can, least_pace(num_layers, time, stage, cap), even * slow)
    layers = np.where(can[:, None], np.minimum(cap, _layers_within(pace, time)), 0.0)
    return LayerSplit(stage, layers, np.minimum(1.0, pace / (even * slow)))


def least_pace(layers: int, time: Floats, stages: Floats, most: Floats) -> Floats:
    """Return the smallest time T of the slowest stage, in seconds, for which all layers can be placed.

    That is, the sum over groups of stages x min(most, floor(T / time)) is at least `layers`, and T is at least the time
    of one layer on every stage.

    Args:
        layers: Number of layers to place.
        time: Time of one layer in seconds, by layout and group.
        stages: Number of stages, by layout and group.
        most: Number of layers that fit in the memory of a stage, by layout and group.
    """
    low, high = np.where(stages > 0, time, 0.0).max(axis=1), layers * time.max(axis=1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = (stages * np.minimum(most, _layers_within(middle, time))).sum(axis=1) >= layers
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.asarray(high)


def _layers_within(pace: Floats, time: Floats) -> Floats:
    return np.asarray(np.floor(pace[:, None] / time * (1 + 1e-12)))


def stage_layers(found: LayerSplit, row: int, layers: int) -> tuple[int, ...]:
    """Return the number of layers on every stage of one layout, in pipeline order.

    Stages get as many layers as `found` allows, and at least one; excess layers are then removed from the last stages.

    Args:
        found: Result of `cut`.
        row: Index of the layout.
        layers: Number of layers in the model.
    """
    counts = [
        max(1, int(n))
        for n, stages in zip(found.layers[row], found.stages[row], strict=True)
        for _ in range(int(stages))
    ]
    spare = sum(counts) - layers
    for place in reversed(range(len(counts))):
        taken = max(0, min(spare, counts[place] - 1))
        counts[place] -= taken
        spare -= taken
    return tuple(counts)


class StepRows(NamedTuple):
    """Settings of some layouts, and their rows in the lookup tables."""

    zero: Ints
    reduces: npt.NDArray[np.bool_]
    """Whether gradients are reduced in the backward pass of every micro-batch; if not, once per step."""
    offload: Ints
    micro: Columns
    """Columns of `tables.micro_table`, such as ``forward``, ``input``, ``weight`` and ``saved``, in seconds."""
    states: Columns
    """Columns of `tables.state_table`, in seconds."""
    drag: Floats
    """Time of drive traffic relative to the time of host-link traffic; see `drag_of`."""
    splits: npt.NDArray[np.bool_]
    """Whether the schedule defers the weight gradients to a separate pass."""


class Late(NamedTuple):
    """Time that waits add to one pass, in seconds."""

    network: Floats
    """Exposed collectives, and packing of compressed gradients."""
    host: Floats
    """Host traffic that takes longer than computation and collectives together."""

    @property
    def total(self) -> Floats:
        """Sum of `network` and `host`."""
        return np.asarray(self.network + self.host)


class Windows(NamedTuple):
    """Waits in the passes of one micro-batch, and the time left to hide other collectives."""

    forward: Late
    backward: Late
    weight: Floats
    """The part of `backward` in the pass of the weight gradients, if that is a separate pass; else 0."""
    free: Floats
    """Time of the backward pass, including waits but not its collectives, in seconds."""


def windows(rows: StepRows, overlap: float) -> Windows:
    """Return the waits in the passes of one micro-batch if computation can hide the fraction `overlap` of collectives.

    ZeRO 3 gathers parameters for both passes. ZeRO 2 and 3 reduce gradients in the backward pass of every micro-batch,
    and pack them each time if they are compressed; FSDP2 in a pipeline only once per step. If weight gradients are a
    separate pass, this pass and the pass of the input gradients each wait for one half, so that faster computation
    makes neither longer. Charging the whole wait to one of them would not ensure this.
    """
    there, back = rows.micro["forward"], rows.micro["input"] + rows.micro["weight"]
    if rows.zero.max() < 2 and not rows.offload.any():
        nothing = Late(np.zeros(1), np.zeros(1))
        return Windows(nothing, nothing, np.zeros(1), back)
    gathered = np.where(rows.zero == 3, rows.states["gather_s"], 0.0)
    reduced = np.where(rows.reduces, rows.states["reduce_s"], 0.0)
    packed = np.where(rows.reduces, rows.states["codec_s"], 0.0)
    out, home = host_seconds(rows)
    forward = _late(there, gathered, overlap, 0.0, out)
    backward, weight = _late(back, gathered + reduced, overlap, packed, home), np.zeros(1)
    if rows.splits.any():
        first, second = (
            _late(rows.micro[half], (gathered + reduced) / 2, overlap, packed / 2, home / 2)
            for half in ("input", "weight")
        )
        parts = zip(backward, first, second, strict=True)
        backward = Late(*(np.where(rows.splits, a + b, whole) for whole, a, b in parts))
        weight = np.where(rows.splits, second.total, 0.0)
    return Windows(forward, backward, weight, np.maximum(back + backward.total - gathered - reduced, 0.0))


def _late(
    busy: Floats, network: Floats, overlap: float, packed: Floats | float, host: Floats | float
) -> Late:
    shown = network - np.minimum(overlap * network, busy) + packed
    return Late(shown, np.maximum(host - busy - shown, 0.0))


def host_seconds(rows: StepRows) -> tuple[Floats | float, Floats | float]:
    """Return the times of host traffic in a forward and in a backward pass, in seconds.

    The host link is full duplex; NVMe drives handle reads and writes in turn.
    """
    if not rows.offload.any():
        return 0.0, 0.0
    traffic = _traffic(rows)
    return _transfer_seconds(traffic.forward, rows.drag), _transfer_seconds(traffic.backward, rows.drag)


def _transfer_seconds(traffic: HostTraffic, drag: Floats) -> Floats:
    both = traffic.to_host + traffic.to_device
    return np.maximum(np.maximum(traffic.to_host, traffic.to_device), drag * both)


def _traffic(rows: StepRows) -> StepTraffic:
    states = rows.states
    offloadable = Offloadable(
        states["weights_s"], states["gradients_s"], states["owned_weights_s"], states["owned_gradients_s"],
        rows.micro["saved"],
    )  # fmt: skip
    return step_traffic(rows.offload, rows.micro["refetched"], offloadable)


def host_update(rows: StepRows) -> Floats:
    """Return the time to move gradients to the host, update states there and move weights back, in seconds."""
    update = _traffic(rows).update
    states = rows.states["host_update_s"] * np.maximum(1.0, rows.drag)
    return np.asarray(update.to_host + states + update.to_device)


def drag_of(cluster: Cluster, drive_share: Floats) -> Floats:
    """Return the time of drive traffic relative to the time of host-link traffic.

    Each device has an equal share of its node's drives. Drives with an unknown bandwidth (0) are not used; if the
    offloaded data exceed host memory, the memory formulas then reject the layout. `drive_share` is the fraction of each
    layout's offloaded bytes that is stored on the drives.
    """
    if not cluster.nvme_bandwidth:
        return np.zeros(1)
    return np.asarray(drive_share * cluster.device.host_bandwidth * cluster.per_node / cluster.nvme_bandwidth)
