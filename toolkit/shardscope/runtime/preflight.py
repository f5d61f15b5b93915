"""Predict, before a job starts on this machine, whether it fits in memory and about how long it takes."""

from __future__ import annotations

from dataclasses import dataclass

from shardscope.analytic.show import figure
from shardscope.errors import LaunchError
from shardscope.machine import nvml_works, usable_memory_bytes
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.prediction.traced import Traced, traced
from shardscope.runtime.driver_server import trace_on_server
from shardscope.spec import Job


@dataclass(frozen=True)
class Preflight:
    """Prediction for a job before it starts."""

    prediction: JobPrediction | None
    """The prediction; None if the job could not be predicted."""
    run_time_s: float | None = None
    """Time of all steps in seconds, without startup, evaluations and checkpoints; None if not predicted."""

    @property
    def refusal(self) -> str | None:
        """Clause on why the job will not fit in this machine's memory; None if it fits or nothing is known."""
        found = self.prediction
        if found is None or found.machine_bytes is None or found.fits:
            return None
        room, whole = figure(usable_memory_bytes(), "bytes"), figure(found.machine_bytes, "bytes")
        others = "" if found.job.world_size == 1 else ", fewer ranks or a higher ZeRO stage"
        return (
            f"it would take {whole} of the {room} that this machine has available; use a smaller batch or smaller "
            f"micro-batches{others}"
        )

    def require_fits(self, way_out: str) -> None:
        """Reject a job that does not fit; `way_out` is a clause on how to start it anyway.

        Raises:
            LaunchError: The job does not fit in this machine's memory.
        """
        if self.refusal is not None:
            raise LaunchError(f"the job does not fit: {self.refusal}, or {way_out}")

    def __str__(self) -> str:
        """Return one line, such as ``Predicted: about 12 s of training once started, 370 MiB of memory in all``."""
        found = self.prediction
        if found is None or self.run_time_s is None:
            return "Nothing could be predicted."
        held = (
            ""
            if found.machine_bytes is None
            else f", {figure(found.machine_bytes, 'bytes')} of memory in all"
        )
        return f"Predicted: {_about(self.run_time_s)} of training once started{held}"


def preflight(job: Job, *, timed: bool = True) -> Preflight:
    """Predict a job before it starts. Rejects nothing; a job that cannot be predicted gets an empty `Preflight`.

    Args:
        job: The job.
        timed: Whether to predict its run time, too.
    """
    if not _is_predictable(job):
        return Preflight(None)
    try:
        found = predict_job(job, trace=_trace)
        _ = found.fits  # computed inside the try block, since a user's method may fail
        return Preflight(found, found.run_time_s if timed else None)
    except Exception:  # noqa: BLE001 - any error in the user's code; its ranks will report it
        return Preflight(None)


def _trace(job: Job) -> Traced:
    return traced(job, trace_on_server, builds=False)


def _is_predictable(job: Job) -> bool:
    """Return whether the job runs on CPUs and has no user functions; those may do anything and run on ranks only."""
    if job.user_functions:
        return False
    return job.device == "cpu" or (job.device == "auto" and not nvml_works())


def _about(seconds: float) -> str:
    """Return a rounded time, such as ``about 40 s``, ``about 3 min`` or ``about 2 h``."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.2g} {unit}"
    return "less than a second" if seconds < 1 else f"about {seconds:.2g} s"
