"""Measurements of a finished run for the fit of constants: its step time and parts, with their prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardscope.errors import SpecError
from shardscope.measure.compare.measured import slowest_rank_s, step_time
from shardscope.measure.compare.rows import after_warm_up
from shardscope.prediction.job import JobPrediction
from shardscope.runlog.spans import finished_steps
from shardscope.runtime import Run
from shardscope.runtime.launcher.preflight import preflight
from shardscope.spec.observed import ObservedJob

PARTS = ("passes", "optimizer", "codec", "communication", "rest")
"""Parts of a step; they add up to the step."""
_OF = {"forward": "passes", "backward": "passes", "optimizer": "optimizer", "codec": "codec",
       "communication": "communication"}  # fmt: skip


class Observed(NamedTuple):
    """A run's measured times, and its prediction."""

    prediction: JobPrediction
    step_s: float
    """Step time of the slowest rank, in seconds: the median over the steps after the warm-up."""
    parts: Mapping[str, float]
    """Seconds of each part except ``rest`` on the rank that computes longest; empty without spans."""


def observed(run: Run) -> Observed:
    """Return the measured times of a run, with its prediction.

    Raises:
        SpecError: The run is an observed training loop, or was on GPUs or a paced link; its job cannot be predicted; or
            it has too few steps.
    """
    if isinstance(run.job, ObservedJob):
        raise SpecError(f"runs contains {run.id!r}, whose step time is not predicted; give runs of ss.launch")
    prediction = preflight(run.resized_job, run.cluster).prediction
    if prediction is None or prediction.time is None:
        raise SpecError(f"runs contains {run.id!r}, whose step time cannot be predicted; leave it out")
    if run.job.link is not None:
        raise SpecError(
            f"runs contains {run.id!r}, which ran on the paced link {run.job.link.label}; leave it out"
        )
    steps = after_warm_up(prediction, finished_steps(run.events(), run.job.world_size))
    period = run.job.compression.period
    step_s = slowest_rank_s(steps, period) if steps else None
    if step_s is None:
        raise SpecError(f"runs contains {run.id!r}, which has too few finished steps; give longer runs")
    found = step_time(steps, period)
    return Observed(prediction.at_step(max(steps)), step_s, {} if found is None else part_sums(found.parts))


def part_sums(parts: Mapping[str, float]) -> dict[str, float]:
    """Sum the times of a comparison's or prediction's parts, in seconds, by part in `PARTS`, without ``rest``."""
    sums: dict[str, float] = {}
    for name, seconds in parts.items():
        if name in _OF:
            sums[_OF[name]] = sums.get(_OF[name], 0.0) + seconds
    return sums
