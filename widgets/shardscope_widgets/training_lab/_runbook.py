"""The list of runs on disk, with a trace for each.

Runs are stored in directories and outlive the kernel, so the list is always read with `shardscope.runs`. After a
page reload or a kernel restart it has the same runs and continues to follow those that are still running.
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
class RunEntry:
    """One run: its handle, its trace, and its state at the last poll."""

    run: Run
    trace: Trace
    state: str = ""
    tail: Any = None
    problem: Skipped | None = None
    """Why the run can no longer be read; None if it can."""

    @property
    def is_alive(self) -> bool:
        """Whether the run was starting or running at the last poll."""
        return self.state in {"starting", "running"}

    def poll(self) -> bool:
        """Read new events; return whether anything visible has changed."""
        before, self.state = (
            self.state,
            self.run.state,
        )  # read the state first, so that no event before the end is missed
        if self.tail is None:
            self.tail = self.run.tail()
        elif before == self.state and not self.is_alive:
            return False
        return self.trace.feed(self.tail.poll()) or before != self.state


@dataclass
class RunBook:
    """The runs in a folder: entries by run id, oldest first; `root` None uses the default folder."""

    root: Path | None = None
    entries: dict[str, RunEntry] = field(default_factory=dict)
    skipped: str = ""
    """One line about the runs that could not be read; empty if all could."""

    def find(self) -> bool:
        """Look for runs added to or removed from the disk; return whether the list or `skipped` has changed."""
        from shardscope.runtime import runs
        from shardscope.runtime.listing import note_on

        before = (list(self.entries), self.skipped)
        found = runs(self.root)
        entries: dict[str, RunEntry] = {}
        bad: list[Skipped] = []
        for run in reversed(found):
            try:
                entries[run.id] = self.entries.get(run.id) or RunEntry(run, Trace.of(run), run.state)
            except Exception as error:  # noqa: BLE001 - one bad run must not hide the others
                bad.append(_skipped(run, error))
        bad += [entry.problem for entry in entries.values() if entry.problem]
        self.entries = entries
        self.skipped = note_on([*found.skipped, *bad])
        self._name_apart()
        return before != (list(self.entries), self.skipped)

    def add(self, run: Run) -> RunEntry:
        """Add a run that has just been started."""
        entry = self.entries.get(run.id) or RunEntry(run, Trace.of(run), run.state)
        self.entries[run.id] = entry
        self._name_apart()
        return entry

    def poll(self, run_ids: Iterable[str]) -> set[str]:
        """Read new events of these runs and of all that are still running; return the ids of those that changed."""
        wanted = {*run_ids, *(run_id for run_id, entry in self.entries.items() if entry.is_alive)}
        return {run_id for run_id in wanted if run_id in self.entries and self._polled(self.entries[run_id])}

    def _polled(self, entry: RunEntry) -> bool:
        """Poll an entry and return whether it changed; a run that cannot be read is recorded as a problem."""
        if entry.problem:
            return False
        try:
            return entry.poll()
        except Exception as error:  # noqa: BLE001 - shown beside the run
            entry.problem = _skipped(entry.run, error)
            return True

    def _name_apart(self) -> None:
        """Number runs with the same name: ``ring-gpt-nano``, ``ring-gpt-nano 2``."""
        seen: dict[str, int] = {}
        for entry in self.entries.values():
            name = entry.run.name
            seen[name] = seen.get(name, 0) + 1
            entry.trace.label = name if seen[name] == 1 else f"{name} {seen[name]}"


def _skipped(run: Run, error: Exception) -> Skipped:
    from shardscope.runtime.listing import Skipped

    return Skipped(run.id, f"{type(error).__name__}: {error}")
