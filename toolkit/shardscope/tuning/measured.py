"""Figures of a run so far, counted and timed, never modelled; and the objective values of a completed run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from shardscope.runlog.averages import ALIKE
from shardscope.runlog.layers import tells_of_layers
from shardscope.runlog.reducer import Evaluation, RunLog
from shardscope.runlog.tail import Tail
from shardscope.runtime.run import Run
from shardscope.spec import Job
from shardscope.tuning.objectives import QUALITIES

if TYPE_CHECKING:
    from shardscope.tuning.definition import Definition

_RARER = 4
"""Alarms are computed again after the looks have grown by one in this many, and when the run has ended."""


@dataclass(frozen=True)
class Measured:
    """Figures of a run, in separate parts, so that its time on another link can be derived from them.

    Attributes:
        steps: Number of steps that all ranks have taken.
        step_s: Median seconds per step of the slowest rank, without the first steps. If steps differ (local SGD, or
            before and after an uncompressed warm-up), each kind is weighted by its share of the job's steps
            (`runlog.averages`); None before there are steps of each kind.
        compute_s: Median seconds of computation in a step, of the rank that computes most; None without spans.
        codec_s: Mean seconds of packing and unpacking in a step, of the rank with most, weighted as `step_s`.
        bytes: Training bytes sent by all ranks so far.
        messages: Training messages sent by all ranks so far.
        memory: Peak bytes of any rank so far.
        curve: Quality on the validation split by step: (step, loss, share of wrong answers).
        alarms: Alarms about its layers when last computed, as sentences (`runlog.alarms`).
        plain_s: Median seconds over all steps so far, of whatever kind; None before the first.
        spent_s: Total seconds of the steps so far; None if recorded by an older version.
        test: Loss and share of wrong answers on the test split, which no choice depends on; None before the last step.
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
        """Return the value of a named objective over `steps` steps; None if it is not known yet.

        Time and bytes are known after a few steps, quality only at the end.
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
class Meter:
    """Follows one run: `read` takes in new events, `measured` computes the figures from all events.

    The process that trains a trial shares its machine with the process that watches it. So the cost of `read`, which is
    called many times a second, depends only on the number of new events; medians are left to `measured`. One thread may
    read while others get the figures.

    Attributes:
        is_piece: Whether the run trains only a part of its job, so that kinds of steps are weighted by how often they
            occurred, not by their share of the whole job.
        log: The events so far, reduced.
    """

    run: Run
    is_piece: bool = False
    log: RunLog = field(init=False)
    _tail: Tail = field(init=False)
    _judged: int = 0
    _judge_at: int = 1
    _alarms: tuple[str, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _measured: Measured | None = None
    """Cached figures of all events read; None after new events."""

    def __post_init__(self) -> None:
        self._tail, self.log = self.run.tail(), RunLog.of(self.run.job)

    def go_on(self, run: Run) -> None:
        """Follow the run that resumes from this one's checkpoint; the figures keep accumulating."""
        with self._lock:
            self.run, self._tail, self._measured = run, run.tail(), None

    @property
    def num_steps(self) -> int:
        """Number of steps that all ranks had taken at the last read."""
        return len(self.log.steps)

    @property
    def num_evaluations(self) -> int:
        """Number of points of the curve at the last read."""
        return len(self.log.evaluations)

    def read(self) -> None:
        """Take in new events."""
        with self._lock:
            events = self._tail.poll()
            if events:
                self.log.feed(events)
                self._measured = None
            if self.log.looks.num_events > self._judged and self._is_due():
                self._judge()
                self._measured = None

    def measured(self) -> Measured:
        """Return the figures of all events read so far; cached until there are new events."""
        with self._lock:
            if self._measured is None:
                self._measured = self._compute()
            return self._measured

    def poll(self) -> Measured:
        """Take in new events and return the figures."""
        self.read()
        return self.measured()

    def _compute(self) -> Measured:
        log, until = self.log, None if self.is_piece else self.run.job.steps
        times = log.steps.column("step_time_s")
        return Measured(
            steps=len(log.steps),
            step_s=log.per_step("step_time_s", average="median", until=until),
            compute_s=log.per_step("compute_s", average="median", kinds=ALIKE),
            codec_s=log.per_step("codec_s", until=until) or 0.0,
            bytes=sum(log.steps.column("sent_bytes")),
            messages=sum(log.steps.column("messages")),
            memory=log.peak_memory_bytes or 0,
            curve=tuple((each.step, *_quality(each)) for each in log.evaluations),
            alarms=self._alarms,
            plain_s=median(times) if times else None,
            spent_s=sum(times),
            test=None if log.final is None else _quality(log.final),
        )

    def _is_due(self) -> bool:
        return self.log.looks.num_looks >= self._judge_at or not self.run.is_alive

    def _judge(self) -> None:
        """Compute alarms from all looks; less often the more looks there are, as the cost grows with them."""
        looks = self.log.looks
        self._judged, num_looks = looks.num_events, looks.num_looks
        self._judge_at = num_looks + max(1, num_looks // _RARER)
        self._alarms = tuple(map(str, looks.layers(self.run.job.optimizer).alarms))


def _quality(evaluation: Evaluation) -> tuple[float, float]:
    """Loss and share of wrong answers."""
    return evaluation.loss, 1.0 - evaluation.accuracy


def evaluated(job: Job, times: int = 8) -> Job:
    """Return the job with `times` evaluations, unless it sets `eval_every`, and with enough looks at its layers."""
    job = looked_into(job)
    if job.eval_every is not None:
        return job
    return job.replace(eval_every=max(1, -(-job.steps // times)))


def looked_into(job: Job, times: int = 20) -> Job:
    """Return the job with at least `times` looks at its layers, if there is something to see and it permits looks."""
    every = min(job.record.layers_every, max(1, job.steps // times))
    if every == job.record.layers_every or not tells_of_layers(job):
        return job
    return job.replace(record=job.record.replace(layers_every=every))


Objective = Callable[[Run], float]
"""A user-defined objective: maps a run that has ended to a number; lower is better."""


def values_of(
    definition: Definition, run: Run, measured: Measured, own: Mapping[str, Objective]
) -> tuple[dict[str, float], str | None]:
    """Return the objective values of a completed run, and a sentence on what is wrong with them, or None."""
    return _values(dict.fromkeys(definition.objectives, run.job.steps), run, measured, own)


def interval_values(
    names: Sequence[str], run: Run, measured: Measured, own: Mapping[str, Objective]
) -> tuple[dict[str, float], str | None]:
    """Return the objective values of a run over a part of its job: quality at its end, the others per step."""
    return _values(
        {name: run.job.last_step if name in QUALITIES else 1 for name in names}, run, measured, own
    )


def _values(
    steps: Mapping[str, int], run: Run, measured: Measured, own: Mapping[str, Objective]
) -> tuple[dict[str, float], str | None]:
    """Return the value of each objective over its number of steps, and a fault or None."""
    values: dict[str, float] = {}
    for name, count in steps.items():
        value = _own_value(name, own[name], run) if name in own else measured.objective(name, count)
        if isinstance(value, str):
            return {}, value
        if value is None or not math.isfinite(value):
            return {}, f"objective {name!r} came to {value}; a trial needs a finite number"
        values[name] = float(value)
    return values, None


def _own_value(name: str, objective: Objective, run: Run) -> float | str:
    """Return the value, or a sentence on the exception of the user's function, which then fails this trial only."""
    try:
        return float(objective(run))
    except Exception as error:  # noqa: BLE001 - see the docstring
        return f"objective {name!r} raised {type(error).__name__}: {error}"
