"""The step time that was predicted for a run when it was launched, in `prediction.json` of its directory.

The file also has the calibration constants at launch, so that the prediction can be reproduced with its breakdown after
another calibration or in another process, and the load of the machine at the launch and at the end of the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.calibration.calibration import Interval
from shardscope.calibration.host_calibration import HostCalibration, chosen
from shardscope.errors import RunUnreadable, ShardscopeError
from shardscope.machine import Place
from shardscope.runtime.record.rundir import RunDir

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction
    from shardscope.runtime.record.run import Run
    from shardscope.spec.cluster import EmulatedCluster

FILE = "prediction.json"
_SCHEMA = 2
BUSY = "other programs kept the machine busy"


class LaunchConstants(NamedTuple):
    """The calibration constants at the launch of a run, recorded even if no step time could be predicted.

    Attributes:
        calibration: The constants.
        is_calibrated: Whether the constants were measured by `ss.calibrate` rather than shipped with Shardscope.
        speed: Speed of the machine relative to the machine on which the constants were measured: FLOP/s and memory
            bandwidth.
        place: Cores and shared memory of the machine; None if they were not recorded.
    """

    calibration: HostCalibration
    is_calibrated: bool
    speed: tuple[float, float] = (1.0, 1.0)
    place: Place | None = None

    @classmethod
    def now(cls, cluster: EmulatedCluster | None) -> LaunchConstants:
        """Return the current constants for predicting a job on this machine or on an emulated cluster."""
        from shardscope.prediction.rates import relative_speed

        found = chosen(cluster)
        return cls(found.calibration, found.is_saved, relative_speed(found.calibration), Place.here())

    @classmethod
    def of_run(cls, run: RunDir) -> LaunchConstants | None:
        """Return the constants of a run; None if none were recorded, or if the file is corrupt."""
        try:
            found: Any = run.read_json(FILE)
            flops, bandwidth = map(float, found.get("speed", (1.0, 1.0)))
            known = _calibration(found.get("calibration"))
            is_valid = known is not None and 0 < flops < inf and 0 < bandwidth < inf
            cores, shares_memory = found.get("cores"), found.get("shares_memory")
            is_placed = cores is not None and 0 < float(cores) < inf and isinstance(shares_memory, bool)
            place = Place(float(cores), shares_memory) if is_placed else None
            return (
                cls(known, bool(found["is_calibrated"]), (flops, bandwidth), place)
                if known and is_valid
                else None
            )
        except (RunUnreadable, TypeError, KeyError, ValueError, AttributeError):
            return None

    def write(self, run: RunDir) -> None:
        """Write the file of a run that is launched now without a predicted step time."""
        calibration = json.loads(self.calibration.to_json())
        place = {} if self.place is None else self.place._asdict()
        told = {"is_calibrated": self.is_calibrated, "speed": self.speed, "load": _load() or 0.0, **place}
        run.write_json(FILE, {"schema": _SCHEMA, **told, "calibration": calibration})

    @property
    def here(self) -> HostCalibration:
        """The constants at launch, rescaled to this machine.

        Predictions with these constants use the relative speed recorded at launch, not a new measurement.
        """
        from shardscope.prediction.rates import relative_speed

        host, now = self.calibration, relative_speed(self.calibration)
        yardsticks = {
            "numpy_flops": host.numpy_flops * now.flops / self.speed[0],
            "numpy_bandwidth": host.numpy_bandwidth * now.bandwidth / self.speed[1],
        }
        return host.model_copy(update=yardsticks)


def constants_of(run: Run) -> LaunchConstants | None:
    """Return the constants of a run's launch; None if they were not recorded."""
    return LaunchConstants.of_run(RunDir(run.path))


class LaunchPrediction(NamedTuple):
    """A step time predicted before the run started.

    Attributes:
        step_time_s: The step time, in seconds.
        interval: 90 % prediction interval of the step time, in seconds; None if unknown.
        constants: Origin of the constants, such as ``this machine, calibrated on 2026-11-26``.
        is_calibrated: Whether the constants were measured by `ss.calibrate` rather than shipped with Shardscope.
        load: Load average of the machine at the launch; predictions are for a machine without other work.
        load_at_end: Load average at the end of the run, including its own ranks; None before the end, or if unknown.
        cores: Number of cores of the machine; None in runs of earlier versions.
        calibration: The constants; None in runs of earlier versions.
        speed: Speed of the machine relative to the one on which `calibration` was measured: FLOP/s and memory
            bandwidth.
        at_peak: Seconds of a step at peak rates, by name; see `prediction.utilization`.
    """

    step_time_s: float
    interval: Interval | None
    constants: str
    is_calibrated: bool
    load: float = 0.0
    load_at_end: float | None = None
    cores: float | None = None
    calibration: HostCalibration | None = None
    speed: tuple[float, float] = (1.0, 1.0)
    at_peak: Mapping[str, float] = MappingProxyType({})

    @classmethod
    def of(cls, prediction: JobPrediction) -> LaunchPrediction | None:
        """Return the step time of a prediction, with its interval and constants; None if it has no step time."""
        from shardscope.prediction.rates import relative_speed

        seconds, host = prediction.step_time_s, prediction.host
        if seconds is None or host is None:
            return None
        return cls(
            float(seconds), prediction.interval, host.label, prediction.is_calibrated,
            calibration=host, speed=relative_speed(host),
            at_peak={name: each for name, each in prediction.at_peak._asdict().items() if each is not None},
        )  # fmt: skip

    def write(self, run: RunDir) -> None:
        """Write the file of a run that is being launched now."""
        found = {
            **self._replace(load=_load() or 0.0, at_peak=dict(self.at_peak))._asdict(),
            **Place.here()._asdict(),
        }
        found["calibration"] = None if self.calibration is None else json.loads(self.calibration.to_json())
        run.write_json(FILE, {"schema": _SCHEMA, **found})

    @staticmethod
    def write_end(run: RunDir) -> None:
        """Add the machine's current load to the prediction file of a run, if it has one; called when the run ends."""
        with suppress(OSError, RunUnreadable, ValueError, TypeError):  # must not change how the run ends
            run.write_json(FILE, {**run.read_json(FILE), "load_at_end": _load()})

    @classmethod
    def of_run(cls, run: RunDir) -> LaunchPrediction | None:
        """Return the prediction of a run; None if none was recorded, or if the file is corrupt."""
        try:
            found: Any = run.read_json(FILE)
            ends, seconds = found["interval"], float(found["step_time_s"])
            if not 0 < seconds < inf:
                return None
            at_end, cores = found.get("load_at_end"), found.get("cores")
            flops, bandwidth = map(float, found.get("speed", (1.0, 1.0)))
            return cls(
                seconds,
                None if ends is None else Interval(*map(float, ends)),
                str(found["constants"]),
                bool(found["is_calibrated"]),
                float(found["load"]),
                None if at_end is None else float(at_end),
                None if cores is None else float(cores),
                _calibration(found.get("calibration")) if 0 < flops < inf and 0 < bandwidth < inf else None,
                (flops, bandwidth),
                at_peak_of(run),
            )
        except (RunUnreadable, TypeError, KeyError, ValueError, AttributeError):
            return None

    def conditions(self, num_ranks: int) -> str:
        """Return a sentence on the time and constants of the prediction, and on the load of the machine.

        Args:
            num_ranks: Number of ranks of the run, which are part of the load at its end.
        """
        at_end = "" if self.load_at_end is None else f", {self.load_at_end:.1f} at the end of the run"
        cores = "" if self.cores is None else f" on {self.cores:g} cores"
        text = (
            f"Predicted at launch, with constants of {self.constants}. "
            f"System load: {self.load:.1f}{cores} at launch{at_end}."
        )
        if self.busy_load(num_ranks):
            text += f" {BUSY.capitalize()}, which makes steps slower than predicted."
        return text

    def busy_load(self, num_ranks: int) -> float:
        """Return the machine's load at the end if it exceeds what this run alone causes; else 0."""
        return load if (load := self.load_at_end or 0.0) >= num_ranks + 1 else 0.0


def at_peak_of(run: RunDir) -> dict[str, float]:
    """Return the recorded seconds of a step at peak rates; empty if none were recorded, or if the file is damaged."""
    with suppress(RunUnreadable, TypeError, ValueError, AttributeError):
        return {name: float(each) for name, each in run.read_json(FILE).get("at_peak", {}).items()}
    return {}


def _load() -> float | None:
    with suppress(OSError):  # unobtainable in some containers
        return os.getloadavg()[0]
    return None


def _calibration(fields: Any) -> HostCalibration | None:
    """Return recorded constants; None if there are none, or if this version cannot predict with them."""
    return None if fields is None else _read(json.dumps(fields))


@lru_cache(maxsize=8)
def _read(text: str) -> HostCalibration | None:
    try:
        return HostCalibration.from_json(text)
    except ShardscopeError:
        return None
