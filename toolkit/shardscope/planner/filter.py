"""Explain in one sentence why a layout is not in the table: which rule it breaks, or how much memory it lacks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import MemoryParts
from shardscope.analytic.memory.offload import drive_bytes_per_device
from shardscope.analytic.recomputation import layers_of_stage
from shardscope.errors import SpecError
from shardscope.planner.emulated import EmulatedDevices
from shardscope.planner.setting import SearchSettings, capacity, lacking_bytes, memory_parts
from shardscope.spec.layout import Layout
from shardscope.spec.layout_rules import recomputes_all, uneven_chunks
from shardscope.spec.units import gib_text

ON_DEVICE = ("parameters", "gradients", "optimizer", "activations", "buffers")
_CURES = {
    "parameters": "more tensor or pipeline ranks, zero=3, or offload='states'",
    "gradients": "zero=2 or 3, or more tensor or pipeline ranks",
    "optimizer": "zero=1 or more, or offload='optimizer'",
    "activations": "recompute='full', a smaller micro_batch, sequence_parallel=True or more context ranks",
    "buffers": "a smaller micro_batch, or more tensor or context ranks",
}
"""Settings that reduce each type of memory; used in error messages."""


class MemoryFit(NamedTuple):
    """Memory that a layout needs, compared with the memory of the cluster's devices, hosts and drives."""

    memory_bytes: float
    """Highest peak memory of any device, in bytes."""
    lacking_bytes: float
    """Bytes by which the layout exceeds the device memory available for tensors; 0 or less if it fits."""
    largest: str
    """Type of memory, such as ``activations``, that takes the most bytes on the device."""
    on_drives_bytes: float
    """Offloaded bytes per device that exceed host memory and drives; 0 or less if the offloaded data fit."""

    @property
    def cure(self) -> str:
        """Settings that would reduce the largest type of memory."""
        return _CURES[self.largest]


def fit_of(setting: SearchSettings, layout: Layout) -> MemoryFit:
    """Compare the memory that a layout needs with the capacities of the device, the host and the drives."""
    parts = memory_parts(setting, Layouts.of([layout]))
    kinds = {name: float(getattr(parts, name)[0]) for name in ON_DEVICE}
    total = float(parts.total[0])
    lacking = total - capacity(setting)
    if isinstance(setting.cluster, EmulatedDevices):
        from shardscope.planner.jobs import figures_of  # needs psutil, which web pages lack

        lacking = min(lacking, 0.0) if figures_of(setting, layout).fits else lacking
    return MemoryFit(total, lacking, max(kinds, key=kinds.__getitem__), _lacking_drives(setting, parts))


def fewest_layers(setting: SearchSettings, layout: Layout) -> int:
    """Return the smallest number of recomputed layers per stage with which a layout fits, below the stage's total.

    The result is 0 if there is no such number, or if the layout recomputes all layers already.
    """
    layers = layers_of_stage(setting.model.layers, layout.pipeline * layout.virtual_stages)
    counts = range(layout.recompute_layers + 1, layers)
    is_emulated = isinstance(setting.cluster, EmulatedDevices)  # jobs recompute all layers or none
    if setting.cluster.groups or is_emulated or not counts or recomputes_all(layout):
        return 0
    table = Layouts.of(layout.replace(recompute="full", recompute_layers=count) for count in counts)
    fits = np.flatnonzero(lacking_bytes(setting, memory_parts(setting, table)) <= 0)
    return counts[int(fits[0])] if fits.size else 0


def _lacking_drives(setting: SearchSettings, parts: MemoryParts) -> float:
    return float(parts.nvme[0]) - drive_bytes_per_device(setting.cluster)


def problem_with(setting: SearchSettings, layout: Layout) -> str:
    """Return the reason why a layout is not in the table; an empty string if it is valid and fits."""
    try:
        layout.check(setting.model, setting.cluster)
    except SpecError as error:
        return str(error)
    stages, layers = layout.pipeline * layout.virtual_stages, setting.model.layers
    if uneven_chunks(layers, layout.pipeline, layout.virtual_stages):
        return (
            f"pipeline={layout.pipeline} x virtual_stages={layout.virtual_stages} = {stages} stages do not divide the "
            f"{layers} layers of {setting.model.name}, but the planner times only schedules with equal stages"
        )
    try:
        fit = fit_of(setting, layout)
    except SpecError as error:  # no job of an emulated cluster has this layout
        return str(error)
    if fit.lacking_bytes > 0:
        count = fewest_layers(setting, layout)
        cure = (
            f"recompute='full' with recompute_layers={count} would fit" if count else f"{fit.cure} would help"
        )
        return (
            f"it needs {gib_text(fit.lacking_bytes)} too much: {gib_text(fit.memory_bytes)} on a device with "
            f"{gib_text(capacity(setting))} for tensors, most of it for {fit.largest}; {cure}"
        )
    if fit.on_drives_bytes > 0:
        return (
            f"it offloads {gib_text(fit.on_drives_bytes)} per device more than the host and its drives can store; "
            "offload less, or set host_memory_bytes, or nvme_bytes with nvme_bandwidth"
        )
    return ""
