"""The runs that the lab knows: those on disk, with a trace for each one that is looked at.

Runs live in directories and outlast the kernel, so the book is filled from `shardscope.runs` and never from
memory: after a page reload or a kernel restart it holds the same runs, and those still running are followed
on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope_widgets.trace import Trace

if TYPE_CHECKING:
    from shardscope.runtime import Run


@dataclass
class Entry:
    """One run: its handle, what it has told, and its state when last asked."""

    run: Run
    trace: Trace
    state: str = ""
    tail: Any = None

    @property
    def is_alive(self) -> bool:
        """Whether it was starting or running when last asked."""
        return self.state in {"starting", "running"}

    def poll(self) -> bool:
        """Read what is new; True if anything that can be seen has changed."""
        before, self.state = (
            self.state,
            self.run.state,
        )  # first the state: events before the end are then all read
        if self.tail is None:
            self.tail = self.run.tail()
        elif before == self.state and not self.is_alive:
            return False
        return self.trace.feed(self.tail.poll()) or before != self.state


@dataclass
class RunBook:
    """Entries by run id, oldest first."""

    root: Path | None = None
    entries: dict[str, Entry] = field(default_factory=dict)

    def find(self) -> bool:
        """Look for runs on disk that came or went; True if there were any."""
        from shardscope.runtime import runs

        before = list(self.entries)
        found = {run.id: run for run in reversed(runs(self.root))}
        kept = {run_id: self.entries.get(run_id) or _entry(run) for run_id, run in found.items()}
        self.entries = {run_id: entry for run_id, entry in kept.items() if entry is not None}
        self._name_apart()
        return before != list(self.entries)

    def add(self, run: Run) -> Entry:
        """Enter a run that has just been started."""
        entry = self.entries.get(run.id) or Entry(run, Trace.of(run), run.state)
        self.entries[run.id] = entry
        self._name_apart()
        return entry

    def poll(self, run_ids: Iterable[str]) -> set[str]:
        """Read what these runs, and all that still run, have written; the ids of those that changed."""
        wanted = {*run_ids, *(run_id for run_id, entry in self.entries.items() if entry.is_alive)}
        return {run_id for run_id in wanted if run_id in self.entries and self.entries[run_id].poll()}

    def _name_apart(self) -> None:
        """Number the runs of one name: ``ring-gpt-nano``, ``ring-gpt-nano 2``."""
        seen: dict[str, int] = {}
        for entry in self.entries.values():
            name = entry.run.name
            seen[name] = seen.get(name, 0) + 1
            entry.trace.label = name if seen[name] == 1 else f"{name} {seen[name]}"


def _entry(run: Run) -> Entry | None:
    """An entry for `run`, or None when its directory cannot be read, for example while it is deleted."""
    try:
        return Entry(run, Trace.of(run), run.state)
    except (OSError, ValueError):
        return None
