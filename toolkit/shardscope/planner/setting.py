"""Model, cluster and calibration of a search, and the time and memory of its layouts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import MemoryParts
from shardscope.analytic.memory.offload import drive_bytes_per_device
from shardscope.calibration.calibration import Calibration
from shardscope.planner.emulated import EmulatedDevices
from shardscope.prediction.step import StepParts, step_time
from shardscope.prediction.step.machine import memory_with, room_on
from shardscope.spec.cluster import Cluster
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]


class SearchSettings(NamedTuple):
    """Model, cluster and calibration, which all layouts of a search share."""

    model: Transformer
    cluster: Cluster
    calibration: Calibration


def time_of(setting: SearchSettings, layouts: Layouts, drive_share: Floats | None = None) -> StepParts:
    """Return the step time by part, in seconds; `drive_share` is `MemoryParts.drive_share`, None to compute it.

    On an emulated cluster, this is the prediction of each layout's job.
    """
    model, cluster, calibration = setting
    if isinstance(cluster, EmulatedDevices):
        from shardscope.planner.jobs import step_parts  # needs psutil, which web pages lack

        return step_parts(setting, layouts)
    return step_time(model, layouts, cluster, calibration, drive_share=drive_share)


def lacking_bytes(setting: SearchSettings, held: MemoryParts) -> Floats:
    """Return the total bytes by which each layout exceeds device memory and drives; 0 if it fits."""
    beyond = np.maximum(held.nvme - drive_bytes_per_device(setting.cluster), 0.0)
    return np.asarray(np.maximum(held.total - capacity(setting), 0.0) + beyond)


def memory_parts(setting: SearchSettings, layouts: Layouts) -> MemoryParts:
    """Return bytes by type of memory; offloaded bytes that exceed a device's share of host memory are on drives."""
    if isinstance(setting.cluster, EmulatedDevices):
        from shardscope.planner.jobs import memory_of  # needs psutil, which web pages lack

        return memory_of(setting, layouts)
    return memory_with(setting.model, layouts, setting.cluster, setting.calibration.software)


def capacity(setting: SearchSettings) -> float:
    """Return the bytes available for tensors on one device."""
    return room_on(setting.cluster, setting.calibration.software)
