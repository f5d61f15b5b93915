"""The step time that was predicted for a run when it was launched, in `prediction.json` of its directory."""

from __future__ import annotations

import os
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.errors import RunUnreadable
from shardscope.spec.calibration import Interval

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction
    from shardscope.runtime.rundir import RunDir

FILE = "prediction.json"
_SCHEMA = 1


class LaunchPrediction(NamedTuple):
    """A step time predicted before the run started.

    Attributes:
        step_time_s: The step time, in seconds.
        interval: Its 90 % interval, in seconds; None if unknown.
        constants: Where the constants came from, such as ``this machine, calibrated on 2026-11-26``.
        is_calibrated: Whether the constants were measured by `ss.calibrate` instead of shipped with Shardscope.
        load: Load average of the machine at the launch; predictions are for a machine without other work.
    """

    step_time_s: float
    interval: Interval | None
    constants: str
    is_calibrated: bool
    load: float = 0.0

    @classmethod
    def of(cls, prediction: JobPrediction) -> LaunchPrediction | None:
        """Return what a prediction says; None if it has no step time."""
        seconds, host = prediction.step_time_s, prediction.host
        if seconds is None or host is None:
            return None
        return cls(float(seconds), prediction.interval, host.label, prediction.is_calibrated)

    def write(self, run: RunDir) -> None:
        """Write the file of a run that is being launched now."""
        load = 0.0
        with suppress(OSError):  # unobtainable in some containers
            load = os.getloadavg()[0]
        run.write_json(FILE, {"schema": _SCHEMA, **self._replace(load=load)._asdict()})

    @classmethod
    def of_run(cls, run: RunDir) -> LaunchPrediction | None:
        """Return the prediction of a run; None if none was recorded, or if the file is damaged."""
        try:
            found: Any = run.read_json(FILE)
            ends, seconds = found["interval"], float(found["step_time_s"])
            if not 0 < seconds < inf:
                return None
            return cls(
                seconds,
                None if ends is None else Interval(*map(float, ends)),
                str(found["constants"]),
                bool(found["is_calibrated"]),
                float(found["load"]),
            )
        except (RunUnreadable, TypeError, KeyError, ValueError):
            return None
