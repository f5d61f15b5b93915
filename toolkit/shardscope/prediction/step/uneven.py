"""Unequal devices: more layers for the faster ones, so that all stages of a pipeline take as long as each other.

The groups of a mixed cluster stand behind each other in the pipeline, each stage within one group. All layers are
equal, so the best contiguous cut gives every stage of a group floor(T / t) layers, t a layer's time there and T the
least for which all layers have a place; what a device's memory cannot hold caps it. Schedules with several stages a
rank keep the even cut, as their chunks must be equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import device_memory
from shardscope.analytic.memory.offload import host_room
from shardscope.prediction.step.parts import StepParts
from shardscope.prediction.step.step import even_time, stage_time
from shardscope.spec.calibration import Calibration
from shardscope.spec.cluster import Cluster
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]

SCALED = (
    "compute", "recompute", "tensor_comm", "context_comm", "expert_comm", "bubble", "data_comm", "offload", "overhead",
)  # fmt: skip
"""Parts of a step that go with the layers of the slowest stage, wholly or in what every micro-batch takes."""
_HALVINGS = 60


class Cut(NamedTuple):
    """How layers are shared between groups, for each layout."""

    stages: Floats
    """By layout and group; 0 throughout where stages do not fall into groups."""
    layers: Floats
    """Of the fullest stage of each group."""
    pace: Floats
    """Time of the slowest stage over that of the even cut on the slowest device; at most 1."""


def step_time(
    model: Transformer,
    layouts: Layouts,
    cluster: Cluster,
    calibration: Calibration,
    *,
    drive_share: Floats | None = None,
) -> StepParts:
    """Seconds of one optimizer step for every layout, part by part; mixed clusters under the best cut of the layers.

    Args:
        model: What is trained.
        layouts: One layout or a million.
        cluster: Its links, host and drives. One of `groups` is as slow and small as any of them.
        calibration: The machine's constants, for all groups.
        drive_share: `MemoryParts.drive_share` of each layout where it is known; None to count it.

    Example:
        >>> parts = step_time(model, Layouts.of([layout]), cluster, calibration)  # doctest: +SKIP
        >>> float(parts.total[0])  # doctest: +SKIP
    """
    pace = cut(model, layouts, cluster, calibration).pace if cluster.groups else 1.0
    return even_time(model, layouts, cluster, calibration, drive_share=drive_share, pace=pace)


def cut(model: Transformer, layouts: Layouts, cluster: Cluster, calibration: Calibration) -> Cut:
    """The best cut of each layout on a cluster of `groups`, each layer as large as on the fullest device evenly cut."""
    memory_bytes = device_memory(model, layouts, host_capacity=host_room(cluster)).total
    even = np.ceil(model.layers / layouts.pipeline)
    a_stage = (layouts.data * layouts.tensor * layouts.context).astype(float)
    times, stages, most = [], [], []
    for group in cluster.groups:
        alone = cluster.replace(device=group.device, intra=group.intra, groups=())
        times.append(stage_time(model, layouts, alone, calibration) / even)
        stages.append(group.num_devices / a_stage)
        most.append(np.floor(group.device.memory_bytes / (memory_bytes / even)))
    slow = stage_time(model, layouts, cluster.replace(groups=()), calibration) / even
    time, stage, cap = (np.stack(columns, axis=1) for columns in (times, stages, most))
    can = (stage == np.floor(stage)).all(axis=1) & (layouts.virtual_stages == 1)
    stage = np.where(can[:, None], stage, 0.0)
    pace = np.where(can, least_pace(model.layers, time, stage, cap), even * slow)
    layers = np.where(can[:, None], np.minimum(cap, _layers_within(pace, time)), 0.0)
    return Cut(stage, layers, np.minimum(1.0, pace / (even * slow)))


def least_pace(layers: int, time: Floats, stages: Floats, most: Floats) -> Floats:
    """The time T of the slowest stage under the best cut: the least with sum of stages x min(most, T / t) >= layers.

    Args:
        layers: To be shared.
        time: Seconds of one layer, by layout and group.
        stages: By layout and group.
        most: Layers that a stage's memory holds, by layout and group.
    """
    low, high = np.zeros(len(time)), layers * time.max(axis=1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = (stages * np.minimum(most, _layers_within(middle, time))).sum(axis=1) >= layers
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.asarray(high)


def _layers_within(pace: Floats, time: Floats) -> Floats:
    return np.asarray(np.floor(pace[:, None] / time * (1 + 1e-12)))


def stage_layers(found: Cut, row: int, layers: int) -> tuple[int, ...]:
    """Layers of every stage of one layout, those of the first group first; what is too many is taken from the last."""
    counts = [
        int(n)
        for n, stages in zip(found.layers[row], found.stages[row], strict=True)
        for _ in range(int(stages))
    ]
    spare = sum(counts) - layers
    for place in reversed(range(len(counts))):
        taken = min(spare, counts[place] - 1)
        counts[place] -= taken
        spare -= taken
    return tuple(counts)
