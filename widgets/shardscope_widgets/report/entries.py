"""The runs of a report, grouped by workload and matched with the single-process run of the same job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardscope.measure.compare.measured import COMMUNICATION, IDLE, StepTime, step_time
from shardscope.runlog.spans import finished_steps
from shardscope.runtime.tools.check_report import BOUNDS
from shardscope.spec.job import Job
from shardscope.spec.run_names import run_names
from shardscope.spec.settings import one_process_baseline
from shardscope_widgets.figures._comparison import RunRow, comparison_info
from shardscope_widgets.trace import Source, Trace


@dataclass(frozen=True)
class Entry:
    """One run of a report.

    Attributes:
        run: The run.
        trace: History of the run.
        row: Metrics of the run; `label` names only what differs within its group.
        alone: Trace of the single-process run of the same job; None if the report has none.
    """

    run: Source
    trace: Trace
    row: RunRow
    alone: Trace | None

    @property
    def label(self) -> str:
        """Name of the run within its group."""
        return self.row.label

    @property
    def is_alone(self) -> bool:
        """Whether the run has a single process."""
        return self.trace.world_size == 1

    @cached_property
    def parts(self) -> StepTime | None:
        """Median time of a step by part, on the rank that computes longest; None without recorded spans."""
        return step_time(finished_steps(self.run.events(), self.trace.world_size))

    @property
    def computing_s(self) -> float | None:
        """Compute time per step in seconds, on the rank that computes longest; None without recorded spans."""
        if self.parts is None:
            return None
        return sum(value for name, value in self.parts.parts.items() if name not in (COMMUNICATION, IDLE))

    @property
    def waiting_s(self) -> float | None:
        """Communication and idle time per step in seconds, on the same rank as `computing_s`; None without spans."""
        if self.parts is None:
            return None
        return sum(self.parts.parts.get(name, 0.0) for name in (COMMUNICATION, IDLE))

    @property
    def held(self) -> dict[str, int]:
        """Bytes of tensors by type on the rank that holds the most; empty if the run did not measure them."""
        return max(self.trace.held.values(), key=lambda kinds: sum(kinds.values()), default={})

    @property
    def difference(self) -> float | None:
        """Largest relative difference between a step's loss and the single process's; None without such a run."""
        if self.widest is None:
            return None
        _, loss, theirs = self.widest
        return abs(loss - theirs) / abs(theirs)

    @cached_property
    def widest(self) -> tuple[int, float, float] | None:
        """The step whose loss differs most, its loss, and the single process's loss; None without such a run."""
        if self.alone is None or self.is_alone:
            return None
        theirs = dict(_losses(self.alone))
        both = [(step, loss, theirs[step]) for step, loss in _losses(self.trace) if theirs.get(step)]
        return max(both, key=lambda each: abs(each[1] - each[2]) / abs(each[2]), default=None)

    @property
    def bound(self) -> float:
        """Largest relative difference that `ss.check` attributes to rounding, for the precision of the job."""
        return BOUNDS.get(getattr(self.run.job, "precision", "fp32"), BOUNDS["fp32"])

    @property
    def agrees(self) -> bool | None:
        """Whether every loss agrees with the single-process run within rounding; None if there is no such run."""
        return None if self.difference is None else self.difference <= self.bound

    @property
    def differs_because(self) -> str | None:
        """Why the strategy or the compression changes the result by design; None if neither does."""
        methods = (getattr(self.run.job, name, None) for name in ("strategy", "compression"))
        reasons = [getattr(method, "differs_because", None) for method in methods]
        return ", and ".join(filter(None, reasons)) or None


@dataclass(frozen=True)
class Group:
    """The runs of one workload, in order; most of them are compared with the single-process run, `alone`."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def alone(self) -> Entry | None:
        """The first single-process run; None if there is none."""
        return next((entry for entry in self.entries if entry.is_alone), None)

    @property
    def parallel(self) -> list[Entry]:
        """The runs on several ranks."""
        return [entry for entry in self.entries if not entry.is_alone]


def groups_of(runs: Iterable[Source]) -> tuple[list[Group], list[str]]:
    """Return the runs by workload, and the names of the runs that have not finished a step."""
    read = [(run, Trace.read(run)) for run in runs]
    told = [(run, trace) for run, trace in read if trace.steps]
    rows = dict(zip([run.id for run, _ in told], comparison_info([trace for _, trace in told]), strict=True))
    traces = [trace for _, trace in told]
    workloads = dict.fromkeys(trace.group for _, trace in told)
    groups = []
    for name in workloads:
        own = [(run, trace) for run, trace in told if trace.group == name]
        labels = _labels([run for run, _ in own])
        entries = (
            Entry(run, trace, rows[run.id]._replace(label=label), _alone(trace, traces))
            for (run, trace), label in zip(own, labels, strict=True)
        )
        groups.append(Group(name, tuple(entries)))
    return groups, [trace.label for _, trace in read if not trace.steps]


def _alone(trace: Trace, others: Sequence[Trace]) -> Trace | None:
    """Return the single-process run that should have the same losses: equal workload, optimizer, learning rates and
    seed.

    None if there is none, or if the job is unknown.
    """
    if trace.job is None:
        return None
    jobs = {place: other.job for place, other in enumerate(others) if other.job is not None}
    same = [place for place, job in jobs.items() if _learning(job) == _learning(trace.job)]
    found = one_process_baseline(trace.job, [jobs[place] for place in same])
    return None if found is None else others[same[found]]


def _learning(job: Job) -> tuple[object, ...]:
    return job.optimizer, job.lr_schedule, job.seed


def _labels(runs: Sequence[Source]) -> list[str]:
    """Return the strategies' labels if these are distinct, otherwise names made of the settings that differ."""
    labels = [run.job.strategy.label for run in runs]
    return labels if len(set(labels)) == len(labels) else run_names([run.job for run in runs])


def _losses(trace: Trace) -> Iterable[tuple[int, float]]:
    return zip(map(int, trace.steps.column("number")), trace.steps.column("loss"), strict=True)
