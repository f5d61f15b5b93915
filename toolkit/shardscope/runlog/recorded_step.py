"""The events of one recorded step of a run, built from its log.

Each rank logs the messages that it sends and those that arrive, with the same clock. The k-th message that arrives at a
rank from another rank, in the same collective, is the k-th message that was sent, because messages of one sender keep
their order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shardscope.runlog.axes import collective_of
from shardscope.runlog.schema import MEMORY_KINDS, Event
from shardscope.runlog.spans import finished_steps
from shardscope.runlog.step_events import MESSAGE, MemoryPoint, StepEvent, StepEvents, in_order

_OPS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
_PASSES = frozenset({"forward", "backward"})
_OF_PASSES = "send"
"""Name of the messages between the stages of a pipeline."""


class _Op(NamedTuple):
    op: str
    stage: int
    microbatch: int
    start: float
    end: float


def recorded_step(
    job: Any, events: Iterable[Event], label: str, *, step: int | None = None
) -> StepEvents | None:
    """Return the events of one step of a run; None if no step has been recorded on all ranks yet.

    Args:
        job: The run's job.
        events: The run's events.
        label: Name of the run.
        step: Number of the step; None for the step whose messages were recorded or, if there is none, the first step
            whose memory was measured.
    """
    log = list(events)
    finished = {
        number: rows
        for number, rows in finished_steps(log, job.world_size).items()
        if all(row.get("spans") for row in rows)
    }
    known = {int(event["step"]) for event in log if event["event"] == "messages"}
    measured = {int(event["step"]) for event in log if event["event"] == "memory"}
    chosen = step if step is not None else _first(finished, known, measured)
    if chosen not in finished:
        return None
    return _Recorded(job, label, chosen, finished[chosen], log).step_events()


def _first(finished: Iterable[int], known: set[int], measured: set[int]) -> int:
    """Return the step to show: the first with messages, else the first with memory, else the first step; 0 if there is
    none.
    """
    order = sorted(finished, key=lambda number: (number not in known, number not in measured, number))
    return order[0] if order else 0


class _Recorded:
    def __init__(self, job: Any, label: str, step: int, rows: Sequence[Event], log: Sequence[Event]) -> None:
        self.job, self.label, self.step, self.rows = job, label, step, rows
        self.own = [event for event in log if event.get("step") == step]
        self.zero = min(start for row in rows for _, _, start, _, _ in row["spans"])
        self.ops = {
            int(event["rank"]): [_Op(*op) for op in event["ops"]]
            for event in self.own
            if event["event"] == "schedule"
        }

    def step_events(self) -> StepEvents:
        job, world_size = self.job, self.job.world_size
        messages = list(self._messages())
        events = [*messages, *self._spans(messages), *self._passes()]
        end = max(event.end_s for event in events)
        return StepEvents(
            label=self.label, origin="measured", arrangement=job.strategy.arrangement(world_size),
            world_size=world_size, step=self.step,
            step_time_s=max(end, *(float(row["step_time_s"]) for row in self.rows)),
            events=in_order(events), memory=tuple(self._memory()),
            roles=tuple(job.strategy.role(rank, world_size) for rank in range(world_size)), note=self._note(messages),
        )  # fmt: skip

    def _note(self, messages: Sequence[StepEvent]) -> str:
        parts = []
        if any(event["event"] == "memory" for event in self.own):
            parts.append("This step is slower than others, because its memory was measured.")
        if not messages and self.job.world_size > 1:
            parts.append("The backend does not report its messages, so only its collectives are shown.")
        return " ".join(parts)

    def _cargo(self, collective: str) -> str:
        if self.job.compression.period > 1:
            return "parameters"
        return str(self.job.strategy.cargo(collective))

    def _messages(self) -> Iterator[StepEvent]:
        """Yield one event for each message, from when it is sent to when it has arrived."""
        arrivals: dict[tuple[str, int, int], deque[float]] = defaultdict(deque)
        sent: list[tuple[int, list[Any]]] = []
        for event in self.own:
            if event["event"] == "messages":
                for row in event["rows"]:
                    if row[1] == "sent":
                        sent.append((event["rank"], row))
                    else:
                        arrivals[row[0], row[2], event["rank"]].append(row[4])
        for rank, (name, _, peer, size, at, item, phase) in sent:
            waiting = arrivals[name, rank, peer]
            end = max(at, waiting.popleft()) if waiting else at
            yield StepEvent(
                rank, MESSAGE, name, at - self.zero, end - self.zero, peer, size,
                self._item(rank, name, item, at), phase,
            )  # fmt: skip

    def _item(self, rank: int, name: str, item: str, at: float) -> str:
        done = (
            [op for op in self.ops.get(rank, ()) if op.end <= at and op.op != "W"]
            if collective_of(name) == _OF_PASSES
            else []
        )
        if done:
            last = max(done, key=lambda op: op.end)
            return f"{self._cargo(name) if last.op == 'F' else 'gradients'} of micro-batch {last.microbatch}"
        return f"{item} of the {self._cargo(name)}" if item else self._cargo(name)

    def _spans(self, messages: Sequence[StepEvent]) -> Iterator[StepEvent]:
        """Yield the spans of all ranks; collectives without logged messages carry the bytes that the rank sent."""
        logged = {(message.rank, message.kind) for message in messages}
        for row in self.rows:
            rank = int(row["rank"])
            unlogged = {
                name: int(sent["sent_bytes"])
                for name, sent in row["traffic"].items()
                if (rank, name) not in logged
            }
            spans = [span for span in row["spans"] if not (rank in self.ops and span[1] in _PASSES)]
            for lane, name, start, end, _ in sorted(spans, key=lambda span: span[2]):
                size = unlogged.pop(name, 0) if lane == "communication" else 0
                item = self._cargo(name) if lane == "communication" else ""
                yield StepEvent(rank, lane, name, start - self.zero, end - self.zero, None, size, item)
            last = max(end for _, _, _, end, _ in row["spans"]) - self.zero
            for name, size in unlogged.items():
                if size:
                    yield StepEvent(rank, "communication", name, last, last, None, size, self._cargo(name))

    def _passes(self) -> Iterator[StepEvent]:
        """Yield a pipeline's passes, micro-batch by micro-batch."""
        for rank, ops in self.ops.items():
            several = len({op.stage for op in ops}) > 1
            for op in ops:
                item = f"micro-batch {op.microbatch}" + (f" on stage {op.stage}" if several else "")
                yield StepEvent(
                    rank, "compute", _OPS.get(op.op, op.op), op.start - self.zero, op.end - self.zero, item=item
                )  # fmt: skip

    def _memory(self) -> Iterator[MemoryPoint]:
        """Yield the measured memory over time; older runs recorded only the peak of each type."""
        points = []
        for event in self.own:
            if event["event"] == "memory":
                peaks = [[self.zero, *(event[kind] for kind in MEMORY_KINDS)]]
                points += [
                    MemoryPoint(event["rank"], max(0.0, row[0] - self.zero), tuple(row[1:]))
                    for row in event.get("curve") or peaks
                ]
        yield from sorted(points, key=lambda point: (point.at_s, point.rank))
