"""Predict, before a job starts on this machine, whether it fits in memory, and its approximate run time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Self

from shardscope.calibration.host_calibration import chosen
from shardscope.errors import DataError, LaunchError, ShardscopeError, SpecError
from shardscope.machine import num_gpus, usable_memory_bytes
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.prediction.traced import Traced, traced
from shardscope.runtime.launcher.driver_server import trace_on_server
from shardscope.runtime.record.launch_prediction import LaunchConstants, LaunchPrediction, constants_of
from shardscope.spec import Job
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.data import DATA
from shardscope.spec.units import figure, work_text
from shardscope.storage.rows import require_batch

if TYPE_CHECKING:
    from shardscope.runtime.record.run import Run


@dataclass(frozen=True)
class MemoryNeed:
    """Predicted memory of a job on this machine.

    Attributes:
        world_size: Number of ranks.
        peak_bytes: Peak memory of the rank with the highest peak, in bytes.
        machine_bytes: Peak memory of all processes together, in bytes.
    """

    world_size: int
    peak_bytes: float
    machine_bytes: float

    @classmethod
    def of(cls, prediction: JobPrediction) -> Self | None:
        """Return the memory in a prediction; None if the prediction has no memory formula."""
        if prediction.peak_bytes is None or prediction.machine_bytes is None:
            return None
        return cls(prediction.job.world_size, prediction.peak_bytes, prediction.machine_bytes)

    @property
    def refusal(self) -> str | None:
        """Clause on why the job does not fit in this machine's available memory; None if it fits."""
        room = usable_memory_bytes()
        if self.machine_bytes <= room:
            return None
        others = "" if self.world_size == 1 else ", fewer ranks or a higher ZeRO stage"
        return (
            f"it would take {figure(self.machine_bytes, 'bytes')} of the {figure(room, 'bytes')} that this machine "
            f"has available; use a smaller batch or smaller micro-batches{others}"
        )

    def require_fits(self, remedy: str) -> None:
        """Reject a job that does not fit; `remedy` is a clause on how to start it anyway.

        Raises:
            LaunchError: The job does not fit in this machine's memory.
        """
        if (refusal := self.refusal) is not None:
            raise LaunchError(f"the job does not fit: {refusal}, or {remedy}")


@dataclass(frozen=True)
class Preflight:
    """Prediction for a job before it starts."""

    prediction: JobPrediction | None
    """The prediction; None if the job could not be predicted."""
    run_time_s: float | None = None
    """Time of all steps in seconds, without startup, evaluations and checkpoints; None if not predicted, as on GPUs."""
    problem: str = ""
    """Why the job could not be predicted, if known."""
    impossible: str = ""
    """Why the job cannot run: its batch is larger than its data, or torch cannot compute it in its precision on this
    machine's processor. Empty if it can, or if that is unknown."""

    @property
    def memory(self) -> MemoryNeed | None:
        """Memory that the job needs; None if it is unknown."""
        return None if self.prediction is None else MemoryNeed.of(self.prediction)

    @property
    def refusal(self) -> str | None:
        """Clause on why the job cannot run on this machine now; None if it can, or if that is unknown."""
        if self.impossible:
            return self.impossible
        does_not_fit = None if self.memory is None else self.memory.refusal
        return None if does_not_fit is None else f"it does not fit: {does_not_fit}"

    def __str__(self) -> str:
        """Return one line, such as ``Predicted for global batch 64: about 12 s of training once started``."""
        if self.impossible:
            return f"Cannot run here: {self.impossible}."
        if self.prediction is None:
            return "Nothing could be predicted."
        job = self.prediction.job
        title = f"Predicted for {work_text(job.batch.global_batch, self.prediction.seq)}"
        if self.run_time_s is None:
            peak = self.prediction.peak_bytes
            held = (
                ""
                if peak is None
                else f"{figure(peak, 'bytes')} of memory on the rank with the highest peak, "
            )
            return f"{title}: {held}but no step time: {self.prediction.note}"
        held = (
            "" if self.memory is None else f", {figure(self.memory.machine_bytes, 'bytes')} of memory in all"
        )
        return f"{title}: {about(self.run_time_s)} of training once started{held}"


def preflight(
    job: Job,
    cluster: EmulatedCluster | None = None,
    *,
    calls_functions: bool = False,
    launched: LaunchConstants | None = None,
) -> Preflight:
    """Predict a job before it starts. Nothing is rejected; a job that cannot be predicted gets an empty `Preflight`.

    Args:
        job: The job.
        cluster: The emulated cluster that it runs on; None for this machine itself.
        calls_functions: Whether the user's functions may be called in this process. They can have any side effect, so
            by default they run only on ranks.
        launched: The constants to predict with; None uses the current constants.
    """
    try:
        require_batch(job)
    except DataError as error:
        return Preflight(None, impossible=str(error))
    if job.user_functions and not calls_functions:
        return Preflight(None)
    traces: list[Traced] = []

    def trace(job: Job) -> Traced:
        traces.append(_trace_own(job) if job.user_functions else _trace(job))
        return traces[-1]

    try:
        constants = None if launched is None else launched.here
        found = predict_job(job, cluster, constants, trace=trace)
        if launched is not None and constants is not None:
            found = replace(found, is_calibrated=launched.is_calibrated, place=launched.place)
        _ = found.by_rank  # computed inside the try block, since a user's method may fail
        why_not = traces[0].uncomputable if traces and _runs_on_cpus(job) else ""
        return Preflight(found, found.run_time_s, impossible=why_not)
    except ShardscopeError as error:
        return Preflight(None, problem=str(error))
    except Exception as error:  # noqa: BLE001 - any error in the user's code; its ranks will report it
        return Preflight(None, problem=f"{type(error).__name__}: {error}")


def preflight_of(run: Run, job: Job | None = None) -> Preflight:
    """Predict a run's job with the constants at its launch, so that its predictions never change.

    Runs without recorded constants, such as runs of earlier versions, are predicted with the current constants.

    Args:
        run: The run.
        job: The run's job with the user's functions, which are then called; None calls none.
    """
    own = run.resized_job if job is None or job.elastic is not None else job
    return preflight(own, run.cluster, launched=constants_of(run), calls_functions=job is not None)


class AtLaunch(NamedTuple):
    """Predictions for a job when it is launched; each is None if it cannot be predicted."""

    memory: MemoryNeed | None = None
    """Memory that the job needs on this machine."""
    step: LaunchPrediction | None = None
    """The step time."""


def predicted_at_launch(job: Job, cluster: EmulatedCluster | None = None) -> AtLaunch:
    """Predict memory and step time of a job that is about to start.

    Cached, so that a study, or a job launched again with another seed, is predicted once.
    """
    if job.user_functions or not _runs_on_cpus(job):
        return AtLaunch()
    try:
        if isinstance(job.data, str) and job.data in DATA:  # a file may change, these never do
            return _cached(_same_prediction(job), cluster, chosen(cluster).calibration.to_json())
        return _at_launch(job, cluster)
    except Exception:  # noqa: BLE001 - any error in the user's code; its ranks will report it
        return AtLaunch()


def constants_at_launch(job: Job, cluster: EmulatedCluster | None) -> LaunchConstants | None:
    """Return the constants with which a job that is about to start can be predicted later; None on GPUs."""
    return LaunchConstants.now(cluster) if _runs_on_cpus(job) else None


def memory_needed(job: Job) -> MemoryNeed | None:
    """Return the memory that a job needs on this machine; None if it cannot be predicted."""
    return predicted_at_launch(job).memory


def _at_launch(job: Job, cluster: EmulatedCluster | None, _calibration: str = "") -> AtLaunch:
    found = predict_job(job, cluster, trace=_trace)
    memory = MemoryNeed.of(found)
    try:
        return AtLaunch(memory, LaunchPrediction.of(found))
    except Exception:  # noqa: BLE001 - a method's formula of time says nothing about memory
        return AtLaunch(memory)


_cached = lru_cache(maxsize=64)(_at_launch)


def _same_prediction(job: Job) -> Job:
    """Return the job with a fixed seed, name and learning rate, because predictions do not depend on these."""
    optimizer = job.optimizer
    if "lr" in type(optimizer).model_fields:
        optimizer = optimizer.model_copy(update={"lr": 1.0})
    return job.model_copy(update={"seed": 0, "name": None, "optimizer": optimizer})


def _trace(job: Job) -> Traced:
    return traced(job, trace_on_server, builds=False)


def _trace_own(job: Job) -> Traced:
    """Trace a job with the user's functions; build the model with real values only if the meta device cannot run it."""
    try:
        return _trace(job)
    except SpecError:
        return traced(job, trace_on_server)


def _runs_on_cpus(job: Job) -> bool:
    return job.device == "cpu" or (job.device == "auto" and not num_gpus())


def about(seconds: float) -> str:
    """Return a rounded time, such as ``about 40 s``, ``about 3 min`` or ``about 2 h``."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.2g} {unit}"
    return "less than a second" if seconds < 1 else f"about {seconds:.2g} s"
