"""The log of a run in the form that figures read: totals per step, labels, and details of recent steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

from shardscope.analytic.large_batch.noise_scale import batches_compared
from shardscope.measure.pipeline_waits import PassTimes
from shardscope.methods.strategies.pipeline import with_split
from shardscope.runlog.recorded_step import recorded_step
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.schema import Event, Moved
from shardscope.runlog.step_events import StepEvents
from shardscope.runlog.steps import ALIKE, StepKinds
from shardscope.runlog.stragglers import Circumstances
from shardscope.spec.job import Job
from shardscope.spec.job_parts import label_of
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.run_names import RunLook, run_names
from shardscope_widgets.attempts import Attempts

_OF_A_STEP = frozenset({"step", "traffic", "messages", "memory", "schedule"})
_MOST_EARLY = 2000
"""Maximum number of events kept in `Trace.early`."""
SPANS_KEPT = 200
"""Number of steps whose spans and operations are kept; those of older steps are dropped to limit memory."""


class TraceSpan(NamedTuple):
    """One activity of one rank, such as a forward pass or an all-reduce; times in Unix seconds."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    num_bytes: int


class TraceOp(NamedTuple):
    """One operation of a pipeline on one rank; times in Unix seconds.

    `op` is ``F`` for forward, ``B`` for backward, or ``I`` and ``W`` for the backward passes for inputs and weights.
    """

    rank: int
    op: str
    stage: int
    microbatch: int
    start: float
    end: float


class Update(NamedTuple):
    """One update that a server applied at Unix time `t`, with the staleness (in updates) of each of its gradients."""

    t: float
    server: int
    staleness: tuple[int, ...]


class Source(Protocol):
    """The part of the interface of `shardscope.Run` that a trace reads."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def job(self) -> Any: ...
    def events(self, kind: str | None = None, rank: int | None = None) -> list[dict[str, Any]]: ...


@dataclass
class Trace(RunLog):
    """The history of one run, in the form that figures read; see `RunLog` for its steps and totals.

    Attributes:
        run_id: Name of the run directory.
        label: Name of the run in text and legends.
        look: Colour and dash of the run while a lab shows it; None lets each figure choose.
        strategy: Name of the run's strategy, which determines its colour in figures.
        group: Group of the run: the name set by the user, else model and data, such as ``gpt-nano on python-source``.
            Only runs of one group share a plot.
        name: The run's own name, which is its label until `named_apart` or the user gives it another label.
        job: The job; None if it is unknown.
        schedule: Name of the pipeline schedule; empty if the strategy is not a pipeline.
        order: The pipeline schedule; None if the strategy is not a pipeline, or the schedule's code is not available.
        passes: Consecutive passes through the pipeline in one step; 1 if the strategy is not a pipeline.
        bound: Maximum staleness that the strategy allows, in updates; None if it has no limit.
        spans: Spans of recent steps, by step.
        ops: Pipeline operations of recent steps, by step.
        pass_times: Duration and waiting fraction of the passes in `ops`, for the steps that figures have drawn.
        updates: Updates of all servers, in order of arrival.
        consensus: Distance of the ranks' parameters from their mean, by step.
        links: Traffic of each rank in its newest step, plus any traffic reported after the step ended, by rank.
        method: Compression method of the gradients, or ``none``; `method_label` adds its non-default settings.
        link: Link that limits the speed of the ranks' traffic, as text; empty if only the machine's own link does.
        kept: Compression metrics (residual norms, bits, matrix ranks) by name and step; the maximum over all workers.
        batches: Sizes of the two batches whose gradients are compared for the gradient noise scale: a rank's
            micro-batch and the global batch; (0, 0) if not recorded.
        optimizer: The job's optimizer.
        early: Events of the first steps, one of which is recorded message by message.
        attempts: Attempts of each rank, with start and step times; a restart begins a new attempt.
    """

    run_id: str
    label: str
    strategy: str
    look: RunLook | None = None
    group: str = ""
    name: str = ""
    job: Job | None = None
    schedule: str = ""
    passes: int = 1
    order: PipelineSchedule | None = None
    bound: float | None = None
    spans: dict[int, list[TraceSpan]] = field(default_factory=dict)
    ops: dict[int, list[TraceOp]] = field(default_factory=dict)
    pass_times: dict[int, PassTimes] = field(default_factory=dict, repr=False)
    updates: list[Update] = field(default_factory=list)
    consensus: dict[int, float] = field(default_factory=dict)
    links: dict[int, Moved] = field(default_factory=dict)
    method: str = "none"
    method_label: str = "none"
    link: str = ""
    kept: dict[str, dict[int, float]] = field(default_factory=dict)
    batches: tuple[int, int] = (0, 0)
    optimizer: Optimizer | None = None
    early: list[Event] = field(default_factory=list, repr=False)
    attempts: Attempts = field(default_factory=Attempts, repr=False)
    _newest: dict[int, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, run: Source) -> Self:  # type: ignore[override]  # it also needs the run's name
        """Return a trace with the metadata of `run` but no events; call `feed` to add events, or use `read` instead."""
        job = run.job
        group = getattr(run, "group", None) or f"{label_of(job.model)} on {label_of(job.data)}"
        bound, schedule = getattr(job.strategy, "bound", None), getattr(job.strategy, "schedule", None)
        compression, link = getattr(job, "compression", None), getattr(job, "link", None)
        return cls(
            run_id=run.id, label=run.name, strategy=job.strategy.name, world_size=job.world_size, group=group,
            name=run.name, job=job if isinstance(job, Job) else None,
            kinds=ALIKE if compression is None else StepKinds.of(job),
            is_asynchronous=isinstance(job, Job) and job.strategy.is_asynchronous,
            circumstances=Circumstances(job if isinstance(job, Job) else None),
            schedule=schedule.name if schedule is not None else "",
            order=schedule if schedule is not None and schedule.is_here else None,
            passes=job.strategy.passes(job.num_micro_batches) if schedule is not None else 1,
            bound=None if bound is None or math.isinf(bound) else float(bound),
            method=getattr(compression, "name", "none"), method_label=getattr(compression, "label", "none"),
            link="" if link is None else link.label,
            batches=batches_compared(job) if getattr(getattr(job, "record", None), "noise_scale", False) else (0, 0),
            optimizer=getattr(job, "optimizer", None),
        )  # fmt: skip

    @classmethod
    def read(cls, run: Source) -> Self:
        """Return a trace with all events of `run` so far."""
        trace = cls.of(run)
        trace.feed(run.events())
        return trace

    def feed(self, events: Iterable[Event]) -> bool:
        new = list(events)
        room = max(0, _MOST_EARLY - len(self.early))
        self.early += [event for event in new if event["event"] in _OF_A_STEP][:room]
        self.attempts.feed(new)
        return super().feed(new)

    def step_events(self) -> StepEvents | None:
        """Return the step whose messages the run records, or the first step of a run without messages.

        None if that step has not finished.
        """
        record = getattr(self.job, "record", None)
        if self.job is None or record is None or not self.steps:
            return None
        if self.last_step < record.logged_step(self.steps[0].number, self.job.steps):
            return None
        return recorded_step(self.job, self.early, self.label)

    def _resize(self, world_size: int) -> None:
        """Drop the details of steps before a resize; per-rank figures show only the steps since the last resize."""
        super()._resize(world_size)
        self.spans, self.ops, self.pass_times, self.links, self._newest = {}, {}, {}, {}, {}

    def _on_step(self, event: Event) -> None:
        super()._on_step(event)
        number, rank = event["step"], event["rank"]
        self._keep_spans(number, rank, event.get("spans") or ())
        self._newest[rank] = number
        self.links[rank] = Moved.of(event)

    def _on_traffic(self, event: Event) -> None:
        super()._on_traffic(event)
        moved, late = self.links.setdefault(event["rank"], Moved()), Moved.of(event)
        moved.sent_bytes += late.sent_bytes
        moved.received_bytes += late.received_bytes

    def _keep_spans(self, number: int, rank: int, spans: Iterable[tuple[Any, ...]]) -> None:
        new = [
            TraceSpan(rank, str(lane), str(name), start, end, int(size or 0))
            for lane, name, start, end, size in spans
        ]
        if new:
            self.spans.setdefault(number, []).extend(new)
            _drop_oldest(self.spans)

    def _on_schedule(self, event: Event) -> None:
        rank = int(event["rank"])
        ops = [
            TraceOp(rank, str(op), int(stage), int(part), start, end)
            for op, stage, part, start, end in event["ops"]
        ]
        self.ops.setdefault(int(event["step"]), []).extend(ops)
        self.pass_times.pop(int(event["step"]), None)
        _drop_oldest(self.ops)

    def _on_update(self, event: Event) -> None:
        self.updates.append(
            Update(float(event["t"]), int(event["server"]), tuple(map(int, event["staleness"])))
        )

    def _on_consensus(self, event: Event) -> None:
        self.consensus[int(event["step"])] = float(event["distance"])

    def _on_compression(self, event: Event) -> None:
        step = int(event["step"])
        for name, value in event["figures"].items():
            if isinstance(value, int | float):
                known = self.kept.setdefault(str(name), {})
                known[step] = max(known.get(step, -math.inf), float(value))

    @property
    def measures_tokens(self) -> bool:
        """Whether this run counts tokens in addition to samples, as for language models."""
        return bool(self.steps) and self.steps[-1].tokens > 0

    def name_of(self, rank: int) -> str:
        """Return the name of a rank: ``rank 0``, or ``rank 0, server`` if ranks have different roles."""
        role = self.starts.get(rank, {}).get("role")
        return f"rank {rank}, {role}" if role else f"rank {rank}"

    def complete_span_steps(self) -> list[int]:
        """Return the steps whose spans every rank has reported, in order."""
        return sorted(n for n, spans in self.spans.items() if len({s.rank for s in spans}) == self.world_size)


def named_apart(traces: Sequence[Trace]) -> list[Trace]:
    """Return the runs with distinct labels, made of the settings in which they differ (see `run_names`).

    A run whose label the user has set keeps it. The returned traces share their events with the given traces.
    """
    plain = [trace for trace in traces if trace.label == trace.name and trace.job is not None]
    names = iter(run_names([with_split(trace.job, trace.split) for trace in plain if trace.job is not None]))
    chosen = {id(trace) for trace in plain}
    return [replace(trace, label=next(names)) if id(trace) in chosen else trace for trace in traces]


def _drop_oldest(by_step: dict[int, Any]) -> None:
    while len(by_step) > SPANS_KEPT:
        del by_step[min(by_step)]
