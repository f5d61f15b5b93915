"""The comparison of a run with its prediction.

Run and prediction use the same names and cover the same steps and ranks. A term that only one of them has is left out,
and the comparison's notes say why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path

from shardscope.calibration.host_calibration import AnyCalibration, chosen
from shardscope.errors import RunUnreadable, ShardscopeError, SpecError
from shardscope.measure.compare.comparison import ComparedTerm, Comparison
from shardscope.measure.compare.measured import Steps
from shardscope.measure.compare.rows import (
    kind_of_step,
    memory_rows,
    time_rows,
    traffic_rows,
    with_rest,
    with_simulation,
)
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.observed import ObservedPrediction
from shardscope.prediction.predict import predict
from shardscope.runlog.axes import TOKENS
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.resizes import sizes_text
from shardscope.runlog.schema import Event
from shardscope.runlog.spans import finished_steps
from shardscope.runtime import Run
from shardscope.runtime.launcher.preflight import preflight, preflight_of
from shardscope.runtime.record.launch_prediction import BUSY, LaunchConstants, LaunchPrediction, constants_of
from shardscope.runtime.record.status import Cause
from shardscope.spec import Job
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.observed import ObservedJob
from shardscope.spec.units import plural, seconds_text

_NOT_PREDICTED = "This run cannot be compared, because its job cannot be predicted here."
_OF_LOADS = (
    "{name}, activations and times are predicted for an even load of experts: differences follow from the run's own "
    "load, in which the busiest expert of a layer got {imbalance:.2f} times as many tokens, mean over layers and the "
    "newest steps."
)
_OF_OWN_LOADS = "With the run's own load, a step is predicted to take {time}."
_OWN_FUNCTIONS = (
    "This run has functions of your own, which are called only at your request: ss.compare(run) calls "
    "them and compares the run, in the session that defines them."
)


def compare(
    run: Run | str | Path,
    cluster: Cluster | EmulatedCluster | None = None,
    *,
    calibration: AnyCalibration | None = None,
    prediction: JobPrediction | ObservedPrediction | None = None,
    root: str | Path | None = None,
) -> Comparison:
    """Compare a run with its prediction, term by term: traffic, memory by type, and step time by part.

    Bytes and messages are means over the newest steps after the warm-up, and each of these steps is predicted
    separately. Memory is from the newest step that measured memory by type. Times are medians. If the first steps were
    uncompressed, bytes, messages and times cover compressed steps only, and are labelled so (`Comparison.per`). A run
    that has not ended is compared up to its newest step, and a resized run from its last resize on. For a training loop
    that `ss.observe` recorded, only bytes and model states are compared. A step is also simulated, where `ss.simulate`
    can simulate the job.

    Args:
        run: A run with at least one finished step, or its name or path.
        cluster: The cluster on which the job ran, one device per rank; None to use the emulated cluster that it was
            launched on or, without one, this machine. The rates of this machine's GPUs are unknown, so step times of a
            run on its GPUs are left out.
        calibration: The constants to predict with, as for `predict`; None for the constants at the launch, stored in
            the run directory. If this machine has been calibrated since, times with the newer constants are added.
        prediction: Existing prediction of the run's job; None to predict the job now.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.

    Raises:
        RunNotFound: The run does not exist.
        RunUnreadable: The run cannot be read, or no step has been finished by all ranks.
        SpecError: The prediction is for a different number of ranks, or the job cannot be predicted: its model or loss
            is a function that does not exist in this process, or cannot be traced without data.

    Example:
        >>> run = ss.launch(ss.Job(model="mlp", data="digits", strategy="ring", world_size=2)).wait()  # doctest: +SKIP
        >>> compare(run)["bytes", "ring_all_reduce"].agrees  # doctest: +SKIP
        True
    """
    run = Run.attach(run, root)
    if prediction is not None and calibration is not None:
        raise SpecError("calibration has no effect on a prediction that is given; omit one of the two")
    events = run.events()
    _finished(run, events)  # reported before any reason why the job cannot be predicted
    launched, newer = None, None
    if prediction is None:
        if cluster is None and calibration is None and not isinstance(run.job, ObservedJob):
            launched = Launched.of(run)
            newer = _predicted(run, None, None) if launched.is_outdated else None
        prediction = _predicted(run, cluster, calibration, launched.constants if launched else None)
    return _compared(run, events, prediction, launched, newer)


def _finished(run: Run, events: Sequence[Event]) -> Steps:
    """Return the steps that all ranks have finished.

    Raises:
        RunUnreadable: No step has been finished by all ranks.
    """
    steps = finished_steps(events, run.job.world_size)
    if not steps:
        ended = (
            f"it ended ({run.state_text}): {run.reason}" if run.reason else f"it has ended ({run.state_text})"
        )
        raise RunUnreadable(
            f"run {run.id} has nothing to compare: not all ranks have finished a step; "
            + ("wait for a step" if run.is_alive else ended)
        )
    return steps


def _compared(
    run: Run,
    events: Sequence[Event],
    prediction: JobPrediction | ObservedPrediction,
    launched: Launched | None,
    newer: JobPrediction | ObservedPrediction | None,
) -> Comparison:
    """Return the comparison of a run with a prediction.

    Args:
        run: The run.
        events: Its events.
        prediction: The prediction.
        launched: Record of the prediction at the launch of the run, if `prediction` is that one.
        newer: A prediction with newer constants, to show in addition.
    """
    job, steps = run.resized_job, _finished(run, events)
    if prediction.job.world_size != job.world_size:
        raise SpecError(
            f"prediction is for {plural(prediction.job.world_size, 'rank')}, but run {run.id} has {job.world_size}; "
            "use ss.predict(run.resized_job)"
        )
    if isinstance(prediction, JobPrediction) and prediction.cluster is None:
        prediction = _where_it_ran(prediction, events)
    notes = [
        f"The run was resized ({sizes}): only the steps from {min(steps)} on are compared, on "
        f"{plural(job.world_size, 'rank')}."
        for sizes in [sizes_text(run.reduced().resizes) if run.job.elastic is not None else None]
        if sizes
    ]
    if run.cause is Cause.RECORDING_STOPPED:
        notes.append(f"The run is not complete: {run.reason}.")
    rows: Iterable[ComparedTerm] = [
        *traffic_rows(prediction, steps, notes),
        *memory_rows(prediction, events, notes),
    ]
    log = RunLog.of(job)
    log.feed(events)
    if log.straggler is not None:
        notes.append(f"{log.straggler.text[0].upper()}{log.straggler.text[1:]}.")
    if log.experts.recent is not None and TOKENS in (prediction.traffic or {}):
        notes.append(_OF_LOADS.format(name=TOKENS, imbalance=log.experts.recent.imbalance))
        if isinstance(prediction, JobPrediction):
            own_s = prediction.with_expert_loads(log.experts.loads).step_time_s
            notes += [] if own_s is None else [_OF_OWN_LOADS.format(time=seconds_text(own_s))]
    where = "this machine"
    per = kind_of_step(prediction, steps)
    if isinstance(prediction, JobPrediction):
        settled = prediction.at_step(max(steps))
        times = list(time_rows(prediction, steps, notes))
        if launched is not None:
            times = launched.told(times, prediction, newer, steps, notes, per=per)
        rows = with_rest(with_simulation([*rows, *times], settled, notes, per=per), per)
        where = prediction.where
        if prediction.has_rates and prediction.note is not None:
            notes.append(prediction.note)
    else:
        notes.append("Step time is left out: it is not predicted for an observed training loop.")
    conditions = "" if launched is None else launched.conditions
    reason = "" if launched is None else launched.reason
    return Comparison(run.id, run.name, where, tuple(rows), tuple(notes), per, conditions, reason)


def _predicted(
    run: Run,
    cluster: Cluster | EmulatedCluster | None,
    calibration: AnyCalibration | None,
    launched: LaunchConstants | None = None,
) -> JobPrediction | ObservedPrediction:
    """Return the prediction of a run's job on a cluster; None uses the emulated cluster of the run, if it has one.

    If `launched` is given, its constants are used.
    """
    if isinstance(run.job, ObservedJob):
        return predict(run.job) if cluster is None else predict(run.job, cluster)
    constants = None if launched is None else launched.here
    found = predict(run.resized_job, cluster or run.cluster, calibration=constants or calibration)
    if launched is not None and constants is not None:
        return replace(found, is_calibrated=launched.is_calibrated, place=launched.place)
    return found


def _where_it_ran(prediction: JobPrediction, events: Sequence[Event]) -> JobPrediction:
    """Return the prediction for the run's own device, backend and transport; a run started now may use others."""
    start = next((event for event in events if event["event"] == "start" and "device" in event), None)
    if start is None:
        return prediction
    is_on_gpus = str(start["device"]).startswith("cuda")
    is_gloo = not is_on_gpus or str(start.get("backend")).startswith("gloo")
    step = replace(
        prediction.step, is_on_gpus=is_on_gpus, backend="gloo" if is_gloo else "nccl",
        shares_host=start.get("transport") != "tcp",
    )  # fmt: skip
    return replace(prediction, step=step)


def comparison_or_reason(
    run: Run, prediction: JobPrediction | None = None, *, job: Job | None = None
) -> Comparison | str:
    """Return the comparison of a finished run with its prediction, or a sentence on why there is none.

    As before a run, the job is traced in the process that launches runs, so this process need not import torch.

    Args:
        run: The run.
        prediction: A prediction of its job; None to predict the job where it ran, with the constants of its launch.
        job: The run's job with the user's functions, which are then called; None calls none.
    """
    try:
        if isinstance(run.job, ObservedJob):
            return compare(run)
        launched = Launched.of(run) if prediction is None else None
        prediction = prediction or preflight_of(run, job).prediction
        if prediction is None:
            return _OWN_FUNCTIONS if run.job.user_functions and job is None else _NOT_PREDICTED
        is_outdated = launched is not None and launched.is_outdated
        own = run.resized_job if job is None else prediction.job
        newer = (
            preflight(own, run.cluster, calls_functions=job is not None).prediction if is_outdated else None
        )
        return _compared(run, run.events(), prediction, launched, newer)
    except ShardscopeError as error:
        return str(error)


_SAME = 1e-3
"""Largest relative difference at which a step time predicted again counts as the recorded one."""


@dataclass(frozen=True)
class Launched:
    """The recorded prediction of a run; None if there is none."""

    run: Run
    prediction: LaunchPrediction | None
    constants: LaunchConstants | None = None
    """Constants with which the run is predicted; None for the current ones."""

    @classmethod
    def of(cls, run: Run) -> Launched:
        """Read the prediction recorded at the launch of a run."""
        return cls(run, run.predicted, constants_of(run))

    @property
    def is_outdated(self) -> bool:
        """Whether current predictions use other constants than the recorded ones, as after `ss.calibrate`."""
        known = self.constants
        return known is not None and known.calibration != chosen(self.run.cluster).calibration

    @property
    def conditions(self) -> str:
        """Constants with which the run was predicted, and load of the machine; empty without a prediction."""
        return "" if self.prediction is None else self.prediction.conditions(self.run.job.world_size)

    @property
    def reason(self) -> str:
        """Why steps took longer than predicted, if other programs kept the machine busy; else empty."""
        is_busy = self.prediction is not None and self.prediction.busy_load(self.run.job.world_size)
        return BUSY if is_busy else ""

    def told(
        self,
        times: Sequence[ComparedTerm],
        prediction: JobPrediction,
        newer: JobPrediction | ObservedPrediction | None,
        steps: Steps,
        notes: list[str],
        *,
        per: str,
    ) -> list[ComparedTerm]:
        """Return the rows of times with the recorded step time, and with newer predictions; add to `notes`.

        Args:
            times: Rows of `prediction`.
            prediction: The prediction, with the recorded constants if any were recorded.
            newer: A prediction with newer constants; None to add no times from it.
            steps: The finished steps of the run.
            notes: Sentences about the comparison.
            per: Name of the whole step's row.
        """
        if self.prediction is None and self.constants is None:
            notes.append("No prediction was recorded when this run was launched, so it is predicted now.")
            return list(times)
        again_s = prediction.step_time_s
        rows = [self._recorded(row, again_s, notes) if row.term == per else row for row in times]
        if not isinstance(newer, JobPrediction) or newer.host is None:
            return rows
        notes.append(f"Predicted now: with constants of {newer.host.label}.")
        found = {row.term: row.predicted for row in time_rows(newer, steps, [])}
        return [replace(row, now=found.get(row.term)) for row in rows]

    def _recorded(self, row: ComparedTerm, again_s: float | None, notes: list[str]) -> ComparedTerm:
        """Return the row of the whole step with the recorded time, unless that time is for other steps.

        Args:
            row: The row.
            again_s: Step time predicted again, to check the recorded one; None if it cannot be predicted.
            notes: Sentences about the comparison.
        """
        known = self.prediction
        was_resized = self.run.job.elastic is not None and bool(self.run.reduced().resizes)
        if (
            known is None
            or was_resized
            or again_s is None
            or not isclose(row.predicted, again_s, rel_tol=_SAME)
        ):
            return row
        if isclose(again_s, known.step_time_s, rel_tol=_SAME):
            return row
        notes.append(
            "The step time is the recorded one; its parts are predicted now, and do not add up to it."
        )
        return replace(row, predicted=known.step_time_s, interval=known.interval)
