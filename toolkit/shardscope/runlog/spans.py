"""Functions to find the steps that all ranks have finished, and to compute the time that spans cover."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardscope.runlog.schema import Event

Interval = tuple[float, float]
_COUNTS = ("payload_bytes", "sent_bytes", "received_bytes", "messages", "calls")


def phase_seconds(
    spans: Iterable[Sequence[Any]], waited: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the time that a rank spent computing in one step by phase, such as ``forward``, in seconds.

    Args:
        spans: The rank's spans of the step, as rows of an event.
        waited: Time that the rank waited for other ranks within passes, in seconds, by phase; it is not counted.
    """
    found: dict[str, float] = {}
    for lane, name, start, end, *_ in spans:
        if lane == "compute":
            found[name] = found.get(name, 0.0) + float(end - start)
    waits = waited or {}
    return {name: max(0.0, seconds - waits.get(name, 0.0)) for name, seconds in found.items()}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered(intervals: Iterable[Interval]) -> float:
    """Return the total length covered by the intervals; where several overlap, the length counts once."""
    return sum(end - start for start, end in union(intervals))


def finished_steps(events: Iterable[Event], world_size: int) -> dict[int, list[Event]]:
    """Return the step events of all steps that all ranks have finished: by step number, a list sorted by rank.

    Of a run that was resized, these are the steps since the last change of its number of ranks. Late traffic, which a
    rank's server sent for a step after the rank had finished the step, is added to that rank's event.

    Args:
        events: The run's events, in order.
        world_size: Number of ranks, for a run whose start events are missing or do not state it.
    """
    steps: dict[int, dict[int, Event]] = {}
    for event in events:
        if event["event"] == "start" and event.get("world_size", world_size) != world_size:
            world_size, steps = event["world_size"], {}
        elif event["event"] == "step":
            steps.setdefault(event["step"], {})[event["rank"]] = event
        elif event["event"] == "traffic" and event["rank"] in (row := steps.get(event["step"], {})):
            row[event["rank"]] = _with_late(row[event["rank"]], event)
    return {
        number: [row[rank] for rank in sorted(row)]
        for number, row in sorted(steps.items())
        if len(row) == world_size
    }


def _with_late(step: Event, late: Event) -> Event:
    traffic = dict(step["traffic"])
    for name, row in late["traffic"].items():
        before = traffic.get(name, {})
        traffic[name] = {key: before.get(key, 0) + row.get(key, 0) for key in _COUNTS}
    return {**step, "traffic": traffic}
