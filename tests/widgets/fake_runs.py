"""Runs that never ran: events as a rank writes them, with made-up but plausible times, for tests of the
interface.
"""

from __future__ import annotations

import math
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardscope.errors import RunFailed, SpecError
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.summary import Summary, summarise
from shardscope.spec import Job

START = 1_800_000_000.0
_writing = threading.Lock()  # a lab reads in threads of its own


@dataclass
class FakeTail:
    pending: list[dict[str, Any]]

    def poll(self) -> list[dict[str, Any]]:
        with _writing:
            events, self.pending = self.pending, []
        return events


@dataclass
class FakeRun:
    """Looks like `shardscope.Run` to everything that only reads."""

    id: str
    job: Any
    all_events: list[dict[str, Any]]
    state: str = "completed"
    error: RunFailed | None = None
    cause: str | None = None
    reason: str | None = None
    stopped: bool = False
    title: str = ""
    tails: list[FakeTail] = field(default_factory=list)
    group: str = "gpt-nano on python-source"
    note: str = ""
    baseline: str | None = None
    made_by: str | None = None
    is_deleted: bool = False
    cluster: Any = None
    predicted: Any = None
    newest_checkpoint: int | None = None
    path: Path = Path("/no/such/run")
    injected: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.title or self.id

    @property
    def is_alive(self) -> bool:
        return self.state in {"starting", "running"}

    def inject(self, faults: Any) -> None:
        self.injected.append(faults)

    def reduced(self) -> RunLog:
        log = RunLog.of(self.job)
        log.feed(self.all_events)
        return log

    def events(self, kind: str | None = None, rank: int | None = None) -> list[dict[str, Any]]:
        keep = lambda event: kind in {None, event["event"]} and rank in {None, event["rank"]}
        return [event for event in self.all_events if keep(event)]

    def tail(self) -> FakeTail:
        with _writing:
            self.tails.append(FakeTail(list(self.all_events)))
            return self.tails[-1]

    def write(self, events: list[dict[str, Any]]) -> None:
        with _writing:
            self.all_events.extend(events)
            for tail in self.tails:
                tail.pending.extend(events)

    @property
    def stored_summary(self) -> Summary | None:
        if self.is_alive:
            return None
        log = RunLog(world_size=self.job.world_size)
        log.feed(self.all_events)
        return summarise(log, self.state, self.job)

    def delete(self) -> None:
        if self.is_alive:
            raise SpecError(f"run {self.id} has not ended; stop it with run.stop(), then delete it")
        self.is_deleted = True

    def stop(self, grace_s: float = 5.0) -> None:
        self.stopped = True
        self.state = "stopped"


def fake_job(strategy: str = "ring", world_size: int = 2, *, steps: int = 60, **changes: Any) -> Job:
    fields = {"model": "gpt-nano", "data": "python-source", "steps": max(1, steps), "batch": 5040}
    return Job(**{**fields, "strategy": strategy, "world_size": world_size, **changes})


def fake_run(
    strategy: str = "ring",
    world_size: int = 2,
    *,
    steps: int = 60,
    run_id: str = "",
    seed: int = 0,
    **changes: Any,
) -> FakeRun:
    world_size = 1 if strategy == "single" else world_size
    events = [
        event for step in range(1, steps + 1) for event in step_events(strategy, world_size, step, seed)
    ]
    starts = [start_event(strategy, world_size, rank) for rank in range(world_size)]
    return FakeRun(
        run_id or f"{strategy}-gpt-nano",
        fake_job(strategy, world_size, steps=steps, **changes),
        starts + events,
    )


def start_event(strategy: str, world_size: int, rank: int) -> dict[str, Any]:
    return {
        "event": "start", "t": START, "rank": rank, "world_size": world_size, "pid": 100 + rank,
        "host": "localhost",
        "device": "cpu", "backend": "gloo", "strategy": strategy, "model": "gpt-nano", "num_params": 200_000,
        "optimizer": "adamw",
    }  # fmt: skip


def step_events(strategy: str, world_size: int, step: int, seed: int = 0) -> list[dict[str, Any]]:
    dice = random.Random(f"{strategy}-{step}-{seed}")
    duration = 0.09 if strategy == "single" else 0.055 + 0.01 * (strategy == "ring") + 0.004 * dice.random()
    begin = START + 1 + step * 0.094
    events = []
    for rank in range(world_size):
        spans, sent = _spans(strategy, world_size, rank, begin, duration, dice)
        events.append({
            "event": "step", "t": begin + duration, "rank": rank, "step": step,
            "loss": 5.6 * math.exp(-step / 40) + 2.4 + dice.gauss(0, 0.06), "samples": 16, "tokens": 1024,
            "step_time_s": duration, "lr": 1e-3, "grad_norm": 1.0, "loss_scale": None,
            "memory_bytes": 180_000_000 + rank * 4_000_000,
            "peak_memory_bytes": 185_000_000 + rank * 4_000_000 + (60_000_000 if strategy == "single" else 0),
            "traffic": {
                name: {"payload_bytes": 800_000, "sent_bytes": size, "received_bytes": size, "calls": 1, "messages": 2}
                for name, size in sent.items()
            },
            "spans": spans,
        })  # fmt: skip
    return events


def _spans(strategy, world_size, rank, begin, duration, dice):
    jitter = 0.02 * duration * dice.random()
    at = lambda part: begin + part * duration + jitter
    spans = [
        ["compute", "data", at(0), at(0.04), 0],
        ["compute", "forward", at(0.05), at(0.3), 0],
        ["compute", "backward", at(0.3), at(0.62), 0],
        ["compute", "optimizer", at(0.9), at(0.97), 0],
    ]
    size = 2 * (world_size - 1) * 800_000 // world_size
    if strategy == "all-reduce":
        spans += [["communication", "all_reduce", at(0.45), at(0.6), size // 2]]
        spans += [["communication", "all_reduce", at(0.62), at(0.86), size // 2]]
        return spans, {"all_reduce": size}
    if strategy == "ring":
        spans += [["communication", "ring_reduce_scatter", at(0.62), at(0.75), size // 2]]
        spans += [["communication", "ring_all_gather", at(0.75), at(0.87), size // 2]]
        return spans, {"ring_reduce_scatter": size // 2, "ring_all_gather": size // 2}
    return spans, {}


GPIPE_F, GPIPE_B = 0.01, 0.02


def memory_events(
    world_size: int, *, step: int = 1, shards: int = 1, activations: int = 300_000
) -> list[dict[str, Any]]:
    """What each rank holds when the optimizer's state is cut into so many shards."""
    return [
        {
            "event": "memory", "t": START, "rank": rank, "step": step, "parameters": 800_000, "gradients": 800_000,
            "optimizer": 1_600_000 // shards, "activations": activations + 10_000 * rank,
            "gathered": 0 if shards == 1 else 200_000, "buffers": 100_000,
        }
        for rank in range(world_size)
    ]  # fmt: skip


def schedule_events(
    stages: int, microbatches: int, *, step: int = 1, split: bool = False, virtual: int = 1
) -> list[dict[str, Any]]:
    """GPipe with a forward pass of 10 ms and a backward pass of 20 ms: its bubble is exactly (p-1)/(m+p-1)."""
    begin = START + step
    back = begin + (microbatches + stages - 1) * GPIPE_F
    events = []
    for rank in range(stages):
        ops: list[list[Any]] = []
        for part in range(microbatches):
            start = begin + (rank + part) * GPIPE_F
            ops.append(["F", rank, part, start, start + GPIPE_F])
            start = back + (stages - 1 - rank + part) * GPIPE_B
            middle, end = start + GPIPE_B / 2, start + GPIPE_B
            ops += (
                [["I", rank, part, start, middle], ["W", rank, part, middle, end]]
                if split
                else [["B", rank, part, start, end]]
            )
        parts = [
            [op, stage + stages * turn, part, start + (end - start) * turn / virtual, (end - start) / virtual]
            for op, stage, part, start, end in ops
            for turn in range(virtual)
        ]
        turns = [[op, stage, part, start, start + length] for op, stage, part, start, length in parts]
        events.append({"event": "schedule", "t": START, "rank": rank, "step": step, "ops": turns})
    return events


def update_events(staleness: list[list[int]], *, server: int = 0) -> list[dict[str, Any]]:
    """A server's updates, one every 10 ms, by the staleness of the gradients in each."""
    return [
        {
            "event": "update", "t": START + 0.01 * number, "rank": server, "step": number, "server": server,
            "workers": list(range(len(values))), "staleness": values,
            "clocks": {str(worker): number for worker in range(len(values))},
        }
        for number, values in enumerate(staleness, start=1)
    ]  # fmt: skip


def consensus_events(distances: list[float], world_size: int = 2) -> list[dict[str, Any]]:
    return [
        {"event": "consensus", "t": START + step, "rank": rank, "step": step, "distance": distance}
        for step, distance in enumerate(distances, start=1)
        for rank in range(world_size)
    ]
