"""Rows of published memory: layout, model, cluster, and the peak of the fullest device, or only whether it sufficed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import (
    FRAMEWORKS,
    Framework,
    device_memory,
    process_bytes,
    stage_memory,
    tensor_room,
)
from shardscope.calibration.software import memory_model
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

GIB = 2**30
Counted = Literal["allocated", "reserved", "process"]


@dataclass(frozen=True)
class MemoryRow:
    """One run of one layout."""

    dataset: str
    model: Transformer
    cluster: Cluster
    layout: Layout
    software: str
    """Software that ran it; a name of `calibration.software.SOFTWARE`."""
    gib: float | None = None
    """Peak memory of the fullest device in GiB; None if it was not published, or if the run ran out of memory."""
    counted: Counted = "allocated"
    """What the peak counts: tensors, what the allocator reserved for them, or the whole process (nvidia-smi)."""
    fits: bool = True
    """Whether the run ran, instead of running out of memory."""
    memory: str = ""
    """Memory model of an older release, a key of `analytic.memory.FRAMEWORKS`; empty for that of the software."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Fields of the memory model that the run set, instead of the software's defaults, and their values."""
    is_fitted: bool = False
    """Whether values of the memory model were inferred from this peak (see `analytic.memory.frameworks`), or a part of
    it was added because this peak showed that it was missing."""
    stage: int | None = None
    """Pipeline stage of which the peak was published; None if it is that of the fullest device."""

    @property
    def run(self) -> Hashable:
        """What identifies a run; tables of one run state its padded vocabulary and its network differently."""
        model = self.model
        sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.seq, model.mixture)
        return sizes, self.cluster.device.name, self.layout, self.framework

    @property
    def framework(self) -> str:
        """Name of the memory model that predicts the row."""
        return self.memory or memory_model(self.software)

    @property
    def conventions(self) -> Framework:
        """The memory model that predicts the row, with the settings of the run."""
        return FRAMEWORKS[self.framework]._replace(**dict(self.settings))

    @property
    def peak_gib(self) -> float:
        """Predicted peak of allocated tensors on the fullest device, in GiB."""
        held = device_memory(
            self.model, Layouts.of([self.layout]), framework=self.conventions, device=self.cluster.device
        )
        return float(held.total[0]) / GIB

    @property
    def predicted_gib(self) -> float:
        """Prediction of what was counted, in GiB."""
        peak = self.peak_gib if self.stage is None else self._stage_gib(self.stage)
        if self.counted == "allocated":
            return peak
        if self.counted == "reserved":
            return peak * FRAMEWORKS[self.framework].reserved
        return process_bytes(self.cluster.device, self.framework, peak * GIB) / GIB

    def _stage_gib(self, stage: int) -> float:
        held = stage_memory(self.model, self.layout, framework=self.conventions, device=self.cluster.device)
        return float(held.total[stage]) / GIB

    @property
    def predicted_to_fit(self) -> bool:
        """Whether the prediction says that the run fits."""
        return self.peak_gib * GIB <= tensor_room(self.cluster.device, self.framework)
