"""Traffic in events: what training sends, and apart from it what a step sends only for measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

Event = Mapping[str, Any]
OBSERVING = frozenset({"noise_scale", "consensus"})
"""Names under which traffic is counted that a step sends only for measurements."""
_COUNTS = ("payload_bytes", "sent_bytes", "received_bytes", "messages", "calls")


@dataclass(slots=True)
class Moved:
    """Training traffic of one rank, or of all."""

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0

    @classmethod
    def of(cls, event: Event) -> Self:
        """Return the training traffic of one event."""
        moved = cls()
        for name, row in event["traffic"].items():
            if name not in OBSERVING:
                moved.add(row)
        return moved

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the traffic of one collective, in the form that events carry."""
        self.sent_bytes += row["sent_bytes"]
        self.received_bytes += row["received_bytes"]
        self.messages += row.get("messages", 0)


def finished_with_spans(events: Iterable[Event], world_size: int) -> list[list[Event]]:
    """Return the step events of each step in which all ranks recorded spans, in order, with late traffic added.

    Late traffic is what a rank's server sent for a step after the rank had finished it.
    """
    steps: dict[int, dict[int, Event]] = {}
    for event in events:
        if event["event"] == "step" and event.get("spans"):
            steps.setdefault(event["step"], {})[event["rank"]] = event
        elif event["event"] == "traffic" and event["rank"] in (row := steps.get(event["step"], {})):
            row[event["rank"]] = _with_late(row[event["rank"]], event)
    return [list(row.values()) for _, row in sorted(steps.items()) if len(row) == world_size]


def _with_late(step: Event, late: Event) -> Event:
    traffic = dict(step["traffic"])
    for name, row in late["traffic"].items():
        before = traffic.get(name, {})
        traffic[name] = {key: before.get(key, 0) + row.get(key, 0) for key in _COUNTS}
    return {**step, "traffic": traffic}
