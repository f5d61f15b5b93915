"""The interval of the step time of a job on this machine, or on a cluster emulated on it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from shardscope.calibration.calibration import Interval
from shardscope.calibration.constants import CONSTANTS
from shardscope.calibration.host_calibration import HostCalibration
from shardscope.prediction.job_time import job_time_term
from shardscope.prediction.rates import limit_of, network_of, stated_rates

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction

_SLACK = 0.02
"""Relative half width of the interval of times that an emulated cluster states: sleeps end a little late."""


def host_interval(prediction: JobPrediction, host: HostCalibration, step_s: float) -> Interval:
    """Return the interval that contains 90 % of step times, in seconds; see `JobPrediction.interval`.

    Args:
        prediction: The prediction.
        host: Its constants of CPU ranks.
        step_s: Its step time.
    """
    stated_s = 0.0 if prediction.emulated is None else _stated_s(prediction)
    low, high = host.interval(step_s - stated_s)
    if not all(row.is_measured for row in host.constants):
        least, most = (_with_unmeasured(prediction, host, times) - stated_s for times in _shipped_ends())
        low, high = min(low, least), max(high, most)
    return Interval(
        stated_s * (1 - _SLACK) + low - _chained_s(prediction, step_s), stated_s * (1 + _SLACK) + high
    )


def _with_unmeasured(prediction: JobPrediction, host: HostCalibration, times: float) -> float:
    """Return the step time if all costs that were not measured here are scaled by this factor."""
    rows = []
    for row in host.constants:
        value = row.value * times if CONSTANTS[row.name].unit in ("s", "x") else row.value / times
        scaled = {"value": value, "low": value, "high": value}
        rows.append(row if row.is_measured else row.model_copy(update=scaled))
    return replace(prediction, host=host.model_copy(update={"constants": tuple(rows)})).step_time_s or 0.0


@lru_cache(maxsize=1)
def _shipped_ends() -> tuple[float, float]:
    """Return the lowest and highest ratio of actual to predicted step time with another machine's constants."""
    return HostCalibration.shipped().interval(1.0)


def _chained_s(prediction: JobPrediction, step_s: float) -> float:
    """Return the part of the step time, in seconds, in which links wait because uneven chunks wait for each other."""
    traffic = prediction.traffic or {}
    if not any(sent.is_uneven for sent in traffic.values()):
        return 0.0
    busy = {name: sent.unchained for name, sent in traffic.items()}
    return max(0.0, step_s - job_time_term(prediction.step, prediction.found, busy, prediction.rates).value)


def _stated_s(prediction: JobPrediction) -> float:
    """Return the part of the step time that the emulated cluster states, in seconds."""
    limit = limit_of(prediction.job, prediction.emulated)
    link = math.inf if limit is None else limit.bandwidth
    rates = stated_rates(prediction.emulated, limit)._replace(
        link=link, network=network_of(prediction.emulated), overlaps=prediction.rates.overlaps
    )
    return job_time_term(prediction.step, prediction.found, prediction.traffic, rates).value
