"""Reading events while they are written: whole lines only, each once, in the order of their time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardscope.runtime.rundir import RunDir

Event = dict[str, Any]


@dataclass
class Tail:
    """An incremental reader of a run's event logs. Cheap to poll: it reads only what is new."""

    run: RunDir
    _offsets: dict[Path, int] = field(default_factory=dict)

    def poll(self) -> list[Event]:
        """The events written since the last call, by time."""
        new = [event for path in self.run.rank_files() for event in self._new_in(path)]
        new.sort(key=lambda event: event["t"])
        return new

    def _new_in(self, path: Path) -> Iterator[Event]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._offsets[path] = self._offsets.get(path, 0) + whole
        for line in text[:whole].splitlines():
            event = _parse(line)
            if event is not None:
                yield event


def _parse(line: bytes) -> Event | None:
    """A line as an event; None for one that a killed rank left torn."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"event", "t", "rank"} <= set(event) else None


def read_events(run: RunDir, kind: str | None = None, rank: int | None = None) -> list[Event]:
    """All events of a run so far, by time; only one kind or one rank if asked."""
    return select(Tail(run).poll(), kind, rank)


def select(events: list[Event], kind: str | None, rank: int | None) -> list[Event]:
    """The events of one kind (None: all) of one rank (None: all)."""
    return [
        event for event in events if kind in (None, event["event"]) and rank in (None, event["rank"])
    ]  # fmt: skip
