"""Metrics of a run so far (all measured, none predicted), and the objective values of a completed run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from shardscope.runlog.layers import reports_layers
from shardscope.runlog.reducer import Evaluation, RunLog
from shardscope.runlog.steps import ALIKE
from shardscope.runlog.tail import Tail
from shardscope.runtime.record.run import Run
from shardscope.spec import Job
from shardscope.tuning.objectives import QUALITIES

_ALARM_GROWTH = 4
"""Alarms are recomputed when the number of layer samples has grown by a quarter, and when the run has ended."""


@dataclass(frozen=True)
class TrialMetrics:
    """Metrics of a run; compute, codec and traffic are separate, so that the time on another link can be predicted.

    Attributes:
        steps: Number of steps that all ranks have taken.
        step_s: Median time of a step on the slowest rank, in seconds, without warm-up steps. If there are several
            kinds of steps (local SGD, or an uncompressed warm-up), the median of each kind is weighted by the kind's
            share of the job's steps (`runlog.steps`); None until there are steps of each kind.
        compute_s: Median compute time per step, in seconds, on the rank that computes the longest; None if the run
            recorded no spans.
        codec_s: Mean time per step of encoding and decoding compressed gradients, in seconds, on the rank with the
            longest time; weighted like `step_s`.
        bytes: Training bytes sent by all ranks so far.
        messages: Training messages sent by all ranks so far.
        memory: Highest peak memory of any rank so far, in bytes.
        curve: Quality on the validation split: tuples (step, loss, fraction of wrong answers).
        alarms: The latest alarms about the run's layers, as sentences (`runlog.alarms`).
        plain_s: Median time over all steps so far, of any kind, in seconds; None until a step has been measured.
        spent_s: Total time of the steps so far, in seconds; None if recorded by an older version.
        test: Loss and fraction of wrong answers on the test split, on which no decision of the study is based; None
            until the test split has been evaluated, after the last step.
    """

    steps: int
    step_s: float | None
    compute_s: float | None
    codec_s: float
    bytes: int
    messages: int
    memory: int
    curve: tuple[tuple[int, float, float], ...]
    alarms: tuple[str, ...] = ()
    plain_s: float | None = None
    spent_s: float | None = None
    test: tuple[float, float] | None = None

    def objective(self, name: str, steps: int) -> float | None:
        """Return the value of an objective for a run of `steps` steps; None if it is not known yet.

        Time and bytes are extrapolated from the steps so far; quality is known only after `steps` steps.
        """
        if name == "seconds":
            return None if self.step_s is None else self.step_s * steps
        if name == "bytes":
            return self.bytes / self.steps * steps if self.steps else None
        if name == "memory":
            return float(self.memory) if self.steps else None
        done = [row for row in self.curve if row[0] >= steps]
        if not done:
            return None
        return done[-1][1] if name == "loss" else done[-1][2]


@dataclass
class TrialReader:
    """Reader of one run: `read` reads new events, `measured` computes the metrics from all events read so far.

    The process that watches a trial shares its machine with the trial and calls `read` many times a second. Therefore
    the cost of `read` depends only on the number of new events, and medians are computed in `measured`. One thread may
    call `read` while other threads call `measured`.

    Attributes:
        is_piece: Whether the run trains only a part of its job. Kinds of steps are then weighted by how often they
            occurred, not by their share of the whole job.
        log: Reduced log of all events read so far.
    """

    run: Run
    is_piece: bool = False
    log: RunLog = field(init=False)
    _tail: Tail = field(init=False)
    _alarmed: int = 0
    _alarm_at: int = 1
    _alarms: tuple[str, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _measured: TrialMetrics | None = None
    """Cached metrics from all events read; None after new events."""

    def __post_init__(self) -> None:
        self._tail, self.log = self.run.tail(), RunLog.of(self.run.job)

    def continue_with(self, run: Run) -> None:
        """Switch to the run that resumes from the current run's checkpoint; the metrics keep accumulating."""
        with self._lock:
            self.run, self._tail, self._measured = run, run.tail(), None

    @property
    def num_steps(self) -> int:
        """Number of steps that all ranks had completed at the last read."""
        return len(self.log.steps)

    @property
    def num_evaluations(self) -> int:
        """Number of evaluations (points of the curve) at the last read."""
        return len(self.log.evaluations)

    def read(self) -> None:
        """Read the run's new events, and recompute its alarms if they are due."""
        with self._lock:
            events = self._tail.poll()
            if events:
                self.log.feed(events)
                self._measured = None
            if self.log.layer_samples.num_events > self._alarmed and self._is_due():
                self._compute_alarms()
                self._measured = None

    def measured(self) -> TrialMetrics:
        """Return the metrics from all events read so far; cached until there are new events."""
        with self._lock:
            if self._measured is None:
                self._measured = self._compute()
            return self._measured

    def poll(self) -> TrialMetrics:
        """Read new events and return the metrics."""
        self.read()
        return self.measured()

    def _compute(self) -> TrialMetrics:
        log, until = self.log, None if self.is_piece else self.run.job.steps
        times = log.steps.column("step_time_s")
        return TrialMetrics(
            steps=len(log.steps),
            step_s=log.per_step("step_time_s", average="median", until=until),
            compute_s=log.per_step("compute_s", average="median", kinds=ALIKE),
            codec_s=log.per_step("codec_s", until=until) or 0.0,
            bytes=sum(log.steps.column("sent_bytes")),
            messages=sum(log.steps.column("messages")),
            memory=log.process_bytes or 0,
            curve=tuple((each.step, *_quality(each)) for each in log.evaluations),
            alarms=self._alarms,
            plain_s=median(times) if times else None,
            spent_s=sum(times),
            test=None if log.final is None else _quality(log.final),
        )

    def _is_due(self) -> bool:
        return self.log.layer_samples.num_samples >= self._alarm_at or not self.run.is_alive

    def _compute_alarms(self) -> None:
        """Compute alarms from all layer samples, at intervals that grow with the number of samples."""
        layer_samples = self.log.layer_samples
        self._alarmed, num_samples = layer_samples.num_events, layer_samples.num_samples
        self._alarm_at = num_samples + max(1, num_samples // _ALARM_GROWTH)
        self._alarms = tuple(map(str, layer_samples.layers(self.run.job.optimizer).alarms))


def _quality(evaluation: Evaluation) -> tuple[float, float]:
    """Return the loss and the fraction of wrong answers."""
    return evaluation.loss, 1.0 - evaluation.accuracy


def evaluated(job: Job, times: int = 8) -> Job:
    """Return the job with `times` evaluations, unless it sets `eval_every`, and with layer statistics."""
    job = with_layer_statistics(job)
    if job.eval_every is not None:
        return job
    return job.replace(eval_every=max(1, -(-job.steps // times)))


def with_layer_statistics(job: Job, times: int = 20) -> Job:
    """Return the job with layer statistics sampled at least `times` times (or at every step), if it records any."""
    every = min(job.record.layers_every, max(1, job.steps // times))
    if every == job.record.layers_every or not reports_layers(job):
        return job
    return job.replace(record=job.record.replace(layers_every=every))


Objective = Callable[[Run], float]
"""A user-defined objective: maps a run that has ended to a number; lower is better."""


def values_of(
    names: Sequence[str],
    run: Run,
    measured: TrialMetrics,
    own: Mapping[str, Objective],
    *,
    is_piece: bool = False,
) -> tuple[dict[str, float], str | None]:
    """Return the objective values of a completed run, and a sentence on invalid values (None if all are valid).

    For a piece (a run that trains a part of its job): quality at its end, and other objectives per step.
    """
    values: dict[str, float] = {}
    for name in names:
        count = run.job.steps if not is_piece else run.job.last_step if name in QUALITIES else 1
        value = _own_value(name, own[name], run) if name in own else measured.objective(name, count)
        if isinstance(value, str):
            return {}, value
        if value is None or not math.isfinite(value):
            return {}, f"objective {name!r} is {value}; a trial needs a finite number"
        values[name] = float(value)
    return values, None


def _own_value(name: str, objective: Objective, run: Run) -> float | str:
    """Return the value of a user-defined objective; if it raises, an error sentence, so that only this trial fails."""
    try:
        return float(objective(run))
    except Exception as error:  # noqa: BLE001 - see the docstring
        return f"objective {name!r} raised {type(error).__name__}: {error}"
