"""The devices of an emulated cluster, as the planner's formula sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import PrivateAttr

from shardscope.calibration.host_calibration import HostCalibration
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.layout import Layout


class JobFigures(NamedTuple):
    """Predicted figures of the job of a layout."""

    seconds: Mapping[str, float]
    """Seconds of each part of a step, by the fields of `StepParts`."""
    memory: Mapping[str, float]
    """Peak bytes of the fullest rank by type, with the names of `MemoryParts`."""
    mfu: float
    """Model FLOPs utilization, from 0 to 1; not a number if it is unknown."""
    fits: bool
    """Whether each rank fits into its node's memory, and all together into this machine's; True if it is unknown."""

    @property
    def step_time_s(self) -> float:
        """Time of one step, in seconds."""
        return sum(self.seconds.values())

    @property
    def held_bytes(self) -> float:
        """Peak memory of the fullest rank, in bytes."""
        return sum(self.memory.values())


class EmulatedDevices(Cluster):
    """Ranks of an emulated cluster as devices.

    Every rank has the rates of the slowest, and an equal part of its node's link. Plans for these devices are timed by
    the predictions of their jobs, in `planner.jobs`; the rates only decide which plans are timed.
    """

    launched_on: EmulatedCluster
    """The emulated cluster on which the jobs run."""
    host: HostCalibration | None = None
    """The constants of this machine's ranks; None for those that `predict` chooses."""
    _known: dict[tuple[str, Layout], JobFigures] = PrivateAttr(default_factory=dict)

    @property
    def predicted(self) -> dict[tuple[str, Layout], JobFigures]:
        """Figures of the layouts predicted so far, by the name of the model and the layout."""
        return self._known
