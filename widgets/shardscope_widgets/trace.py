"""The events that a run has reported so far, step by step.

A `Trace` is fed the events of a run directory as they arrive and keeps what the figures draw: one `Step` for
every step that all ranks have finished, the spans and chunks of recent steps, and the memory of every rank.
It depends on neither files nor widgets, so a live panel, a report and a test fill it the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shardscope.analytic.large_batch.noise_scale import Squares, batches_compared
from shardscope.runlog.summary import Average, mean_loss, per_step_of, sent_bytes, squares_of, with_late
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.user_code import label_of
from shardscope_widgets.steps import Step, Steps

Event = Mapping[str, Any]
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")
"""Kinds of a rank's memory; `gathered` are parameters gathered temporarily from other ranks."""
SPANS_KEPT = 200
"""Number of steps whose spans, chunks and operations are kept; older ones are dropped to bound memory."""


class Span(NamedTuple):
    """One activity of one rank; times in Unix seconds."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    num_bytes: int


class Op(NamedTuple):
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
    """One update that a server applied at Unix time `t`, with the staleness in updates of each gradient in it."""

    t: float
    server: int
    staleness: tuple[int, ...]


class Source(Protocol):
    """The part of a `shardscope.Run` that a trace reads."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def job(self) -> Any: ...
    def events(self, kind: str | None = None, rank: int | None = None) -> list[dict[str, Any]]: ...


@dataclass
class Trace:
    """The history of one run, in the form that figures read.

    Attributes:
        run_id: Name of the run directory.
        label: Name of the run in text and legends.
        strategy: Short name of its strategy; decides the colour.
        world_size: Number of ranks; a step counts as finished when all of them have reported it.
        workload: Model and data, for example ``gpt-nano on python-source``; runs with equal workloads are comparable.
        schedule: Name of the pipeline schedule; empty for other strategies.
        order: The pipeline schedule itself; None if its code is not available, and for other strategies.
        passes: Consecutive passes through the pipeline in one step; 1 for other strategies.
        bound: Staleness bound in updates; None if there is none.
        roles: Role of each rank, for example ``server``, for strategies in which ranks differ.
        held: Bytes by kind that each rank held, from its newest memory event.
        ops: Pipeline operations by step.
        updates: Updates of all servers, in order of arrival.
        consensus: Distance of the ranks' parameters from their mean, by step.
        links: (sent, received) bytes of each rank in its newest step, plus late traffic reported since then.
        method: Compression method of the gradients, or ``none``; `method_label` adds its non-default settings.
        period: Period of the wire traffic in steps; above 1 under local SGD only.
        link: Paced link of the ranks as text; empty for the machine's own link.
        kept: Metrics of compression (residual norms, bits, ranks) by name and step; the maximum over ranks.
        noise: Squared gradient norms of the steps that measured gradient noise.
        batches: Samples in the two gradients compared for the noise: a small batch and a whole step.
        optimizer: The job's optimizer.
        layers: Layer events of the ranks: trust ratios, and residuals of compression.
    """

    run_id: str
    label: str
    strategy: str
    world_size: int
    workload: str = ""
    schedule: str = ""
    passes: int = 1
    order: PipelineSchedule | None = None
    bound: float | None = None
    steps: Steps = field(default_factory=Steps)
    peak_memory: dict[int, int] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)
    chunks: dict[int, list[Event]] = field(default_factory=dict)
    errors: list[Event] = field(default_factory=list)
    evals: list[Event] = field(default_factory=list)
    roles: dict[int, str] = field(default_factory=dict)
    held: dict[int, dict[str, int]] = field(default_factory=dict)
    ops: dict[int, list[Op]] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    consensus: dict[int, float] = field(default_factory=dict)
    links: dict[int, tuple[int, int]] = field(default_factory=dict)
    method: str = "none"
    method_label: str = "none"
    period: int = 1
    link: str = ""
    kept: dict[str, dict[int, float]] = field(default_factory=dict)
    noise: dict[int, Squares] = field(default_factory=dict)
    batches: tuple[int, int] = (0, 0)
    optimizer: Optimizer | None = None
    layers: list[Event] = field(default_factory=list)
    backend: str = ""
    num_params: int | None = None
    _pending: dict[int, dict[int, Event]] = field(default_factory=dict, repr=False)
    _newest: dict[int, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, run: Source) -> Trace:
        """Return an empty trace with the metadata of `run`; feed it events, or use `read`."""
        job = run.job
        workload = f"{label_of(job.model)} on {label_of(job.data)}"
        bound, schedule = getattr(job.strategy, "bound", None), getattr(job.strategy, "schedule", None)
        compression, link = getattr(job, "compression", None), getattr(job, "link", None)
        return cls(
            run.id, run.name, job.strategy.name, job.world_size, workload,
            schedule=schedule.name if schedule is not None else "",
            order=schedule if schedule is not None and schedule.is_here else None,
            passes=job.strategy.passes(job.num_micro_batches) if schedule is not None else 1,
            bound=None if bound is None or math.isinf(bound) else float(bound),
            method=getattr(compression, "name", "none"), method_label=getattr(compression, "label", "none"),
            period=getattr(compression, "period", 1), link="" if link is None else link.label,
            batches=batches_compared(job) if getattr(getattr(job, "record", None), "noise_scale", False) else (0, 0),
            optimizer=getattr(job, "optimizer", None),
        )  # fmt: skip

    @classmethod
    def read(cls, run: Source) -> Trace:
        """Return a trace of all events of `run` so far."""
        trace = cls.of(run)
        trace.feed(run.events())
        return trace

    def feed(self, events: Iterable[Event]) -> bool:
        """Take in new events, in order for each rank; return whether any of them is shown by a figure."""
        return sum(self._take(event) for event in events) > 0

    def _take(self, event: Event) -> bool:
        take = getattr(self, f"_on_{event.get('event')}", None)
        if take is None:
            return False
        take(event)
        return True

    def _on_start(self, event: Event) -> None:
        self.backend = str(event.get("backend") or self.backend)
        self.num_params = event.get("num_params") or self.num_params
        if event.get("role"):
            self.roles[int(event["rank"])] = str(event["role"])

    def _on_step(self, event: Event) -> None:
        number, rank = int(event["step"]), int(event["rank"])
        peak = event.get("peak_memory_bytes") or event.get("memory_bytes") or 0
        self.peak_memory[rank] = max(self.peak_memory.get(rank, 0), int(peak))
        self._keep_spans(number, rank, event.get("spans") or ())
        self._newest[rank] = number
        self.links[rank] = _moved(event)
        ranks = self._pending.setdefault(number, {})
        ranks[rank] = event
        if len(ranks) == self.world_size:
            rows = list(self._pending.pop(number).values())
            self.steps.append(_merge(number, rows))
            squares = squares_of(rows)
            if squares is not None:
                self.noise[number] = squares

    def _on_traffic(self, event: Event) -> None:
        """Add traffic that a rank's server sent for a step after the rank had finished it."""
        number, rank = int(event["step"]), int(event["rank"])
        (sent, received), (sent_late, received_late) = self.links.get(rank, (0, 0)), _moved(event)
        self.links[rank] = sent + sent_late, received + received_late
        ranks = self._pending.get(number)
        if ranks is None:
            self.steps.add_bytes(number, sent_bytes(event))
        elif rank in ranks:
            ranks[rank] = with_late(ranks[rank], event)

    def _keep_spans(self, number: int, rank: int, spans: Iterable[tuple[Any, ...]]) -> None:
        new = [
            Span(rank, str(lane), str(name), start, end, int(size or 0))
            for lane, name, start, end, size in spans
        ]
        if new:
            self.spans.setdefault(number, []).extend(new)
            _drop_oldest(self.spans)

    def _on_chunk(self, event: Event) -> None:
        """Store a chunk; one without a step belongs to the step after its rank's newest finished one."""
        step = event.get("step") or self._newest.get(int(event["rank"]), 0) + 1
        self.chunks.setdefault(int(step), []).append(event)
        _drop_oldest(self.chunks)

    def _on_memory(self, event: Event) -> None:
        self.held[int(event["rank"])] = {kind: int(event[kind]) for kind in MEMORY_KINDS}

    def _on_schedule(self, event: Event) -> None:
        rank = int(event["rank"])
        ops = [
            Op(rank, str(op), int(stage), int(part), start, end)
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

    def _on_layers(self, event: Event) -> None:
        self.layers.append(event)

    def _on_error(self, event: Event) -> None:
        self.errors.append(event)

    def _on_eval(self, event: Event) -> None:
        self.evals.append(event)

    @property
    def measures_tokens(self) -> bool:
        """Whether this run counts tokens in addition to samples, as language models do."""
        return bool(self.steps) and self.steps[-1].tokens_per_s is not None

    def per_step(self, figure: str, *, average: Average = "mean") -> float | None:
        """Average of a field of `Step` per step, without warm-up; None before the first whole period."""
        numbers, values = self.steps.column("number"), self.steps.column(figure)
        return per_step_of(numbers, values, self.period, average=average)

    def name_of(self, rank: int) -> str:
        """``rank 0``, or ``rank 0, server`` where ranks differ."""
        role = self.roles.get(rank)
        return f"rank {rank}, {role}" if role else f"rank {rank}"

    def complete_span_steps(self) -> list[int]:
        """Steps whose spans every rank has reported, in order."""
        return sorted(n for n, spans in self.spans.items() if len({s.rank for s in spans}) == self.world_size)


def _merge(number: int, events: list[Event]) -> Step:
    slowest = max(float(event["step_time_s"]) for event in events)
    tokens = [event["tokens"] for event in events if event.get("tokens") is not None]
    return Step(
        number=number,
        loss=math.nan if (loss := mean_loss(events)) is None else loss,
        step_time_s=slowest,
        samples_per_s=sum(event["samples"] for event in events) / slowest if slowest else 0.0,
        tokens_per_s=sum(tokens) / slowest if tokens and slowest else None,
        bytes_sent=sum(map(sent_bytes, events)),
    )


def _moved(event: Event) -> tuple[int, int]:
    """Bytes of one event over all collectives, as (sent, received)."""
    rows = event["traffic"].values()
    return sum(int(row["sent_bytes"]) for row in rows), sum(int(row["received_bytes"]) for row in rows)


def _drop_oldest(by_step: dict[int, Any]) -> None:
    while len(by_step) > SPANS_KEPT:
        del by_step[min(by_step)]
