"""Traffic in events: what is sent for training, separate from what a step sends only for measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

Event = Mapping[str, Any]
OBSERVING = frozenset({"noise_scale", "consensus"})
"""Names under which events count traffic that a step sends only for measurements."""


@dataclass(slots=True)
class Moved:
    """Training traffic of one rank, or of several ranks together."""

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
        """Add the traffic of one collective, in the form that events contain."""
        self.sent_bytes += row["sent_bytes"]
        self.received_bytes += row["received_bytes"]
        self.messages += row.get("messages", 0)
