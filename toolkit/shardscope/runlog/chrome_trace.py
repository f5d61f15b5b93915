"""Spans as events of a Chrome trace: one process for each rank, one thread for each lane of its timeline.

The file format is Google's Trace Event Format (JSON object form); https://ui.perfetto.dev and chrome://tracing open it.
Slices of one thread must nest, so spans of a lane that overlap, such as concurrent collectives, get separate threads.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

_US = 1e6
_STEPS = "steps"


def write_trace(spans: pd.DataFrame, path: str | Path, about: Mapping[str, str]) -> str:
    """Write spans to a file, compressed if its name ends in ``.gz``, and return its path.

    Args:
        spans: A timeline in the form that `Run.timeline` returns.
        path: The file.
        about: Metadata of the trace, by key.
    """
    trace = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms", "otherData": dict(about)}
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(trace).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return str(file)


def trace_events(spans: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the trace events for a timeline in the form that `Run.timeline` returns.

    Times are in microseconds from the first span. The ``args`` of a span that transfers data include its ``bytes``.
    """
    events: list[dict[str, Any]] = []
    for rank, own in spans.groupby("rank"):
        pid = int(str(rank))
        events.append(_named("process_name", pid, 0, f"rank {pid}"))
        events.append(_named("process_sort_index", pid, 0, pid))
        for thread, (name, slices) in enumerate(_threads(own)):
            events.append(_named("thread_name", pid, thread, name))
            events.append(_named("thread_sort_index", pid, thread, thread))
            events += [{**each, "ph": "X", "pid": pid, "tid": thread} for each in slices]
    return events


def _threads(spans: pd.DataFrame) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name and the slices of each thread of one rank: the thread of its steps, then the threads of
    its lanes.
    """
    yield _STEPS, list(_steps(spans))
    for lane, own in spans.groupby("lane", sort=False):
        for number, rows in enumerate(_apart(own)):
            name = str(lane) if number == 0 else f"{lane} {number + 1}"
            yield (
                name,
                [
                    _slice(row.title, row.start_s, row.end_s, step=row.step, num_bytes=row.bytes)
                    for row in rows
                ],
            )


def _steps(spans: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield a slice for each step; it ends no later than the next step begins, even if a collective ends later."""
    rows = spans.groupby("step").agg(start=("start_s", "min"), end=("end_s", "max")).reset_index()
    following = [*rows["start"][1:], rows["end"].max()]
    for step, start, end, limit in zip(rows["step"], rows["start"], rows["end"], following, strict=True):
        yield _slice(f"step {step}", start, min(end, limit), step=step)


def _apart(spans: pd.DataFrame) -> list[list[Any]]:
    """Divide spans among as few threads as possible such that the spans of each thread do not overlap."""
    threads: list[list[Any]] = []
    for row in (
        spans.sort_values(["start_s", "end_s"]).rename(columns={"name": "title"}).itertuples(index=False)
    ):
        free = next((rows for rows in threads if rows[-1].end_s <= row.start_s), None)
        if free is None:
            threads.append([row])
        else:
            free.append(row)
    return threads


def _slice(name: str, start_s: float, end_s: float, *, step: Any, num_bytes: Any = 0) -> dict[str, Any]:
    start = round(float(start_s) * _US, 3)
    about = {"step": int(step), **({"bytes": int(num_bytes)} if num_bytes else {})}
    return {"name": str(name), "ts": start, "dur": round(float(end_s) * _US - start, 3), "args": about}


def _named(kind: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    """Return a metadata event, which names or orders a process or a thread."""
    key = "sort_index" if kind.endswith("sort_index") else "name"
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {key: value}}
