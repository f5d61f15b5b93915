"""What a run has told so far, step by step.

A `Trace` is fed the events of a run directory as they arrive and keeps what the figures draw: one `Step` for
every step that all ranks have finished, the spans and chunks of recent steps, and the memory of every rank.
It knows neither files nor widgets, so that a live panel, a report and a test fill it the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shardscope.runtime.noise import Squares, batches_compared, squares_of
from shardscope.runtime.summary import Average, mean_loss, per_step_of, sent_bytes, with_late
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.user_code import label_of
from shardscope_widgets.steps import Step, Steps

Event = Mapping[str, Any]
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")
"""What a rank's memory is told apart by; `gathered` are parameters borrowed from other ranks for a moment."""
SPANS_KEPT = 200
"""Steps whose spans are kept for the timeline; older ones are dropped, so that long runs stay small."""


class Span(NamedTuple):
    """Something one rank was busy with; times in Unix seconds."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    num_bytes: int


class Op(NamedTuple):
    """One operation of a pipeline on one rank: ``F`` forward, ``B`` backward, ``I`` and ``W`` its halves for input and
    weights; times in Unix seconds.
    """

    rank: int
    op: str
    stage: int
    microbatch: int
    start: float
    end: float


class Update(NamedTuple):
    """One update that a server applied at Unix time `t`: how many updates behind each gradient in it was."""

    t: float
    server: int
    staleness: tuple[int, ...]


class Source(Protocol):
    """The part of a `shardscope.Run` that a trace is made from."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def job(self) -> Any: ...
    def events(self, kind: str | None = None, rank: int | None = None) -> list[dict[str, Any]]: ...


@dataclass
class Trace:
    """The readable history of one run.

    Attributes:
        run_id: Name of the run directory.
        label: What to call the run in words and legends.
        strategy: Short name of its strategy; decides the colour.
        world_size: Number of ranks; a step counts as finished once all of them have reported it.
        workload: What was trained, for example ``gpt-nano on python-source``; such runs can be compared.
        schedule: Of a pipeline; empty for other strategies.
        order: Of a pipeline: its schedule, where its code is here.
        passes: Of a pipeline: in how many parts, one after another, a step's micro-batches flow through it.
        bound: The most updates that a gradient may be behind; None where there is no such bound.
        roles: What a rank is, for example ``server``, for strategies in which ranks differ.
        held: Bytes by kind that each rank held in the newest step that tells.
        ops: A pipeline's operations, step by step.
        updates: Of all servers, in order of arrival.
        consensus: Distance of the ranks' parameters from their mean, by step.
        links: Bytes that each rank sent and received in its newest step, and since then for earlier ones.
        method: How gradients were compressed, ``none`` where they were not; `method_label` says how hard.
        period: Steps after which what crosses the wire repeats itself; above 1 under local SGD only.
        link: What the ranks were held to, in words; empty for the machine's own.
        kept: What compression told of itself (norms of residuals, bits, ranks), by figure and step; the largest rank's.
        noise: Of steps that measured their gradient noise, what they told.
        batches: Samples in the two gradients that were compared for it, of a small batch and of a whole step.
        optimizer: The job's.
        layers: What ranks told of their layers: trust ratios, and what compression owes.
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
        """An empty trace that carries the names of `run`; feed it events, or use `read`."""
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
        """The whole history of `run` as it stands."""
        trace = cls.of(run)
        trace.feed(run.events())
        return trace

    def feed(self, events: Iterable[Event]) -> bool:
        """Take in new events, each rank's in their order; True if there was one that a figure shows."""
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
        """What a rank's server has sent for a step that the rank had finished before."""
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
        """A chunk without a step belongs to the one that its rank has not finished yet."""
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
        """Whether this run counts tokens, as language models do, and not only samples."""
        return bool(self.steps) and self.steps[-1].tokens_per_s is not None

    def per_step(self, figure: str, *, average: Average = "mean") -> float | None:
        """What a field of `Step` comes to per step, warm-up left out; None before the first whole period."""
        numbers, values = self.steps.column("number"), self.steps.column(figure)
        return per_step_of(numbers, values, self.period, average=average)

    def name_of(self, rank: int) -> str:
        """``rank 0``, or ``rank 0, server`` where ranks differ."""
        role = self.roles.get(rank)
        return f"rank {rank}, {role}" if role else f"rank {rank}"

    def complete_span_steps(self) -> list[int]:
        """Steps of which every rank has reported its spans, in order."""
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
