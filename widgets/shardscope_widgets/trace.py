"""The log of a run in the form that figures read: totals per step, labels, and details of recent steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

from shardscope.analytic.large_batch.noise_scale import batches_compared
from shardscope.runlog.averages import ALIKE, StepKinds
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.traffic import Event, Moved
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.user_code import label_of

SPANS_KEPT = 200
"""Number of steps whose spans, chunks and operations are kept; older ones are dropped to limit memory."""


class TraceSpan(NamedTuple):
    """One activity of one rank; times in Unix seconds."""

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
    """Interface of `shardscope.Run` that a trace reads."""

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
        strategy: Short name of its strategy, which determines the colour.
        workload: Model and data, for example ``gpt-nano on python-source``; runs with equal workloads are comparable.
        schedule: Name of the pipeline schedule; empty for other strategies.
        order: The pipeline schedule object; None if its code is not available, and for other strategies.
        passes: Consecutive passes through the pipeline in one step; 1 for other strategies.
        bound: Staleness bound in updates; None if there is none.
        spans: Spans of recent steps, by step.
        chunks: Chunk events of recent steps, by step.
        ops: Pipeline operations of recent steps, by step.
        updates: Updates of all servers, in order of arrival.
        consensus: Distance of the ranks' parameters from their mean, by step.
        links: Traffic of each rank in its newest step, plus traffic that it has reported since then.
        method: Compression method of the gradients, or ``none``; `method_label` adds its non-default settings.
        link: Link that ranks are paced to, as text; empty for the machine's own link.
        kept: Compression metrics (residual norms, bits, matrix ranks) by name and step; the maximum over all workers.
        batches: Numbers of samples in the two gradients compared to estimate noise: a small batch and a whole step.
        optimizer: The job's optimizer.
    """

    run_id: str
    label: str
    strategy: str
    workload: str = ""
    schedule: str = ""
    passes: int = 1
    order: PipelineSchedule | None = None
    bound: float | None = None
    spans: dict[int, list[TraceSpan]] = field(default_factory=dict)
    chunks: dict[int, list[Event]] = field(default_factory=dict)
    ops: dict[int, list[TraceOp]] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    consensus: dict[int, float] = field(default_factory=dict)
    links: dict[int, Moved] = field(default_factory=dict)
    method: str = "none"
    method_label: str = "none"
    link: str = ""
    kept: dict[str, dict[int, float]] = field(default_factory=dict)
    batches: tuple[int, int] = (0, 0)
    optimizer: Optimizer | None = None
    _newest: dict[int, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, run: Source) -> Self:  # type: ignore[override]  # it also needs the run's name
        """Return a trace with the metadata of `run` but no events; call `feed` to add events, or use `read` instead."""
        job = run.job
        workload = f"{label_of(job.model)} on {label_of(job.data)}"
        bound, schedule = getattr(job.strategy, "bound", None), getattr(job.strategy, "schedule", None)
        compression, link = getattr(job, "compression", None), getattr(job, "link", None)
        return cls(
            run_id=run.id, label=run.name, strategy=job.strategy.name, world_size=job.world_size, workload=workload,
            kinds=ALIKE if compression is None else StepKinds.of(job),
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

    def _on_chunk(self, event: Event) -> None:
        """Store a chunk event; one without a step number belongs to the step after its rank's last finished step."""
        step = event.get("step") or self._newest.get(int(event["rank"]), 0) + 1
        self.chunks.setdefault(int(step), []).append(event)
        _drop_oldest(self.chunks)

    def _on_schedule(self, event: Event) -> None:
        rank = int(event["rank"])
        ops = [
            TraceOp(rank, str(op), int(stage), int(part), start, end)
            for op, stage, part, start, end in event["ops"]
        ]
        self.ops.setdefault(int(event["step"]), []).extend(ops)
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


def _drop_oldest(by_step: dict[int, Any]) -> None:
    while len(by_step) > SPANS_KEPT:
        del by_step[min(by_step)]
