"""What a run has come to so far, counted and timed, never modelled, and the objectives of one that has completed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import median
from typing import TYPE_CHECKING, Any

from shardscope.runtime.layers import Looks, tells_of_layers
from shardscope.runtime.run import Run
from shardscope.runtime.summary import WARM_UP_STEPS, number, per_step, sent_bytes, with_late
from shardscope.runtime.tail import Event, Tail
from shardscope.spec import Job
from shardscope.tuning.objectives import QUALITIES

if TYPE_CHECKING:
    from shardscope.tuning.definition import Definition

_RARER = 4
"""Alarms are looked for again once there are this fraction more looks, and when the run has ended."""


@dataclass(frozen=True)
class Measured:
    """A run's figures, its parts apart, so that its time on another link can be told from them.

    Attributes:
        steps: Taken by all ranks.
        step_s: Median over steps of the slowest rank, the first ones left out. Of steps that are unlike (local SGD's,
            and those before and after an uncompressed warm-up) each sort as often as the job has it (`per_step_of`);
            None before there are steps of both.
        compute_s: Of such a step, what the rank that computes most computed, if its spans were written.
        codec_s: Packing and unpacking in a step, of the rank that does most (mean, warm-up left out).
        bytes: Sent by all ranks so far.
        messages: Sent by all ranks so far.
        memory: Most bytes of a rank so far.
        curve: Held-back quality by step: (step, loss, share of wrong answers).
        alarms: What is wrong with its layers as last looked for, in sentences (`runtime.alarms`).
        plain_s: Median over all steps so far, alike or not; None before the first.
        spent_s: All that the steps so far have taken; None of what an older version has noted.
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

    def objective(self, name: str, steps: int) -> float | None:
        """The value of a named objective for the whole of `steps`, as far as is known; None where nothing is.

        Time and bytes are known after a few steps; quality only at the end.
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
    """Follows one run: `read` takes in the new events, `measured` computes the figures from all of them.

    The process that trains a trial shares its machine with the process that watches it. So `read`, which is called many
    times a second, costs as much as there are new events, however many steps came before; medians are left to
    `measured`. One thread may read while others ask for the figures.

    Attributes:
        is_piece: Whether the run takes its job only a part of the way, and its steps stand for nothing but themselves.
    """

    run: Run
    is_piece: bool = False
    _tail: Tail = field(init=False)
    _ranks: int = field(init=False)
    _open: dict[int, dict[int, Event]] = field(default_factory=dict)
    _times: list[float] = field(default_factory=list)
    _computed: list[float] = field(default_factory=list)
    _codec: list[float] = field(default_factory=list)
    _bytes: int = 0
    _messages: int = 0
    _memory: int = 0
    _curve: list[tuple[int, float, float]] = field(default_factory=list)
    _looks: Looks = field(default_factory=Looks)
    _judged: int = 0
    _judge_at: int = 1
    _alarms: tuple[str, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _measured: Measured | None = None
    """The figures of all that has been read; None once there is more."""

    def __post_init__(self) -> None:
        self._tail = self.run.tail()
        self._ranks = self.run.job.world_size

    def go_on(self, run: Run) -> None:
        """Follow the run that goes on from this one's checkpoint; the figures go on adding up."""
        self.run, self._tail = run, run.tail()
        self._open.clear()

    @property
    def num_steps(self) -> int:
        """Steps that all ranks had taken when it last read."""
        return len(self._times)

    @property
    def num_evaluations(self) -> int:
        """Points of the curve when it last read."""
        return len(self._curve)

    def read(self) -> None:
        """Take in the events that are new."""
        with self._lock:
            for event in self._tail.poll():
                self._take(event)
                self._measured = None
            if self._looks.num_events > self._judged and self._is_due():
                self._judge()
                self._measured = None

    def measured(self) -> Measured:
        """The figures of all that has been read, computed once until there is more."""
        with self._lock:
            if self._measured is None:
                self._measured = self._compute()
            return self._measured

    def poll(self) -> Measured:
        """The figures by now."""
        self.read()
        return self.measured()

    def _compute(self) -> Measured:
        computed = self._computed[WARM_UP_STEPS:] or self._computed
        codec = self._codec[WARM_UP_STEPS:] or self._codec  # the first step compiles
        return Measured(
            steps=len(self._times), step_s=self._step_s(),
            compute_s=median(computed) if computed else None,
            codec_s=sum(codec) / len(codec) if codec else 0.0,
            bytes=self._bytes, messages=self._messages, memory=self._memory, curve=tuple(self._curve),
            alarms=self._alarms,
            plain_s=median(self._times) if self._times else None, spent_s=sum(self._times),
        )  # fmt: skip

    def _step_s(self) -> float | None:
        """Steps before and after an uncompressed warm-up are weighted as often as the whole job has them."""
        job, times = self.run.job, dict(enumerate(self._times, 1))
        warm = 0 if self.is_piece else job.compression.uncompressed(job.steps)
        if not warm:
            return per_step(times, job.compression.period, average="median")
        first = {step: time for step, time in times.items() if step <= warm}
        rest = [time for step, time in times.items() if step > warm]
        before = per_step(first, average="median")
        if before is None or not rest:
            return None
        after = median(rest[WARM_UP_STEPS:] or rest)
        return (warm * before + (job.steps - warm) * after) / job.steps

    def _is_due(self) -> bool:
        return self._looks.num_looks >= self._judge_at or not self.run.is_alive

    def _judge(self) -> None:
        """Look for alarms; the more looks there are, the rarer, for each time all of them are gone through."""
        self._judged, num_looks = self._looks.num_events, self._looks.num_looks
        self._judge_at = num_looks + max(1, num_looks // _RARER)
        self._alarms = tuple(map(str, self._looks.layers(self.run.job.optimizer).alarms))

    def _take(self, event: Event) -> None:
        if event["event"] == "eval" and event["rank"] == 0:
            self._curve.append((event["step"], _number(event["loss"]), 1.0 - _number(event["accuracy"])))
        if event["event"] == "layers":
            self._looks.take(event)
        if event["event"] == "traffic":
            self._take_late(event)
        if event["event"] != "step":
            return
        row = self._open.setdefault(event["step"], {})
        row[event["rank"]] = event
        if len(row) == self._ranks:
            self._count(list(self._open.pop(event["step"]).values()))

    def _take_late(self, event: Event) -> None:
        """What a server has sent for a step that its own rank had finished before."""
        row, rank = self._open.get(event["step"]), event["rank"]
        if row is None:
            self._count_traffic(event)
        elif rank in row:
            row[rank] = with_late(row[rank], event)

    def _count_traffic(self, event: Event) -> None:
        self._bytes += sent_bytes(event)
        self._messages += sum(each.get("messages", 0) for each in event["traffic"].values())

    def _count(self, row: list[Event]) -> None:
        self._times.append(max(event["step_time_s"] for event in row))
        if all("spans" in event for event in row):
            self._computed.append(max(map(_compute_seconds, row)))
        self._codec.append(max(event.get("codec_s", 0.0) for event in row))
        for event in row:
            self._count_traffic(event)
        self._memory = max(self._memory, *(event["peak_memory_bytes"] or 0 for event in row))


def _number(value: Any) -> float:
    return nan if value is None else number(value)


def _compute_seconds(event: Event) -> float:
    return sum(float(end - start) for lane, _, start, end, *_ in event["spans"] if lane == "compute")


def evaluated(job: Job, times: int = 8) -> Job:
    """The job, evaluated `times` times on its way where it does not say itself, and looked into often enough."""
    job = looked_into(job)
    if job.eval_every is not None:
        return job
    return job.replace(eval_every=max(1, -(-job.steps // times)))


def looked_into(job: Job, times: int = 20) -> Job:
    """The job, with at least `times` looks at its layers where there is something to see and it does not forbid it."""
    every = min(job.record.layers_every, max(1, job.steps // times))
    if every == job.record.layers_every or not tells_of_layers(job):
        return job
    return job.replace(record=job.record.replace(layers_every=every))


Objective = Callable[[Run], float]
"""A user's own: from a run that has ended to a number, the less the better."""


def values_of(
    definition: Definition, run: Run, measured: Measured, own: Mapping[str, Objective]
) -> tuple[dict[str, float], str | None]:
    """The objectives of a run that has completed, and what is wrong with them, as a sentence."""
    return _values(dict.fromkeys(definition.objectives, run.job.steps), run, measured, own)


def interval_values(
    names: Sequence[str], run: Run, measured: Measured, own: Mapping[str, Objective]
) -> tuple[dict[str, float], str | None]:
    """The objectives of a run that takes its job a part of the way: quality as it stands there, the others per step."""
    return _values(
        {name: run.job.last_step if name in QUALITIES else 1 for name in names}, run, measured, own
    )


def _values(
    steps: Mapping[str, int], run: Run, measured: Measured, own: Mapping[str, Objective]
) -> tuple[dict[str, float], str | None]:
    """By objective, each over its steps."""
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
    """The value, or what the user's function raised, as a sentence: it may raise anything, and ends one trial."""
    try:
        return float(objective(run))
    except Exception as error:  # noqa: BLE001 - as the docstring says
        return f"objective {name!r} raised {type(error).__name__}: {error}"
