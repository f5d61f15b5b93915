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
    from shardscope.runtime.listing import Skipped


@dataclass
class Entry:
    """One run: its handle, what it has told, and its state when last asked."""

    run: Run
    trace: Trace
    state: str = ""
    tail: Any = None
    problem: Skipped | None = None
    """Why it cannot be shown any further."""

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
    skipped: str = ""
    """One line on the runs that could not be read; empty where all could."""

    def find(self) -> bool:
        """Look for runs on disk that came or went; True if there were any."""
        from shardscope.runtime import runs
        from shardscope.runtime.listing import note_on

        before = (list(self.entries), self.skipped)
        found = runs(self.root)
        entries: dict[str, Entry] = {}
        bad: list[Skipped] = []
        for run in reversed(found):
            try:
                entries[run.id] = self.entries.get(run.id) or Entry(run, Trace.of(run), run.state)
            except Exception as error:  # noqa: BLE001 - one bad run must not hide the others
                bad.append(_skipped(run, error))
        bad += [entry.problem for entry in entries.values() if entry.problem]
        self.entries = entries
        self.skipped = note_on([*found.skipped, *bad])
        self._name_apart()
        return before != (list(self.entries), self.skipped)

    def add(self, run: Run) -> Entry:
        """Enter a run that has just been started."""
        entry = self.entries.get(run.id) or Entry(run, Trace.of(run), run.state)
        self.entries[run.id] = entry
        self._name_apart()
        return entry

    def poll(self, run_ids: Iterable[str]) -> set[str]:
        """Read what these runs, and all that still run, have written; the ids of those that changed."""
        wanted = {*run_ids, *(run_id for run_id, entry in self.entries.items() if entry.is_alive)}
        return {run_id for run_id in wanted if run_id in self.entries and self._polled(self.entries[run_id])}

    def _polled(self, entry: Entry) -> bool:
        """Whether anything of it has changed. A run that cannot be shown becomes a note and is not read again."""
        if entry.problem:
            return False
        try:
            return entry.poll()
        except Exception as error:  # noqa: BLE001 - shown beside the run
            entry.problem = _skipped(entry.run, error)
            return True

    def _name_apart(self) -> None:
        """Number the runs of one name: ``ring-gpt-nano``, ``ring-gpt-nano 2``."""
        seen: dict[str, int] = {}
        for entry in self.entries.values():
            name = entry.run.name
            seen[name] = seen.get(name, 0) + 1
            entry.trace.label = name if seen[name] == 1 else f"{name} {seen[name]}"


def _skipped(run: Run, error: Exception) -> Skipped:
    from shardscope.runtime.listing import Skipped

    return Skipped(run.id, f"{type(error).__name__}: {error}")
