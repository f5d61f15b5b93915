"""A queued change to a run's job, which waits for the run to end because concurrent runs slow each other down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from shardscope.runtime import Run
    from shardscope_widgets.training_lab._runbook import RunBook

_ENDS = {"stopped": "was stopped", "failed": "has failed"}


class Queued(NamedTuple):
    """A change to a run's job, as `Job.replace` takes it, and whether the run was in progress when it was queued."""

    run: Run
    change: Mapping[str, Any]
    awaits_end: bool


class ChangeQueue:
    """A queue of at most one change, which starts once its run has completed and no other run is in progress.

    If the run fails, is deleted, or is stopped other than by the Stop button, the change is cancelled, and `note` says
    so until the next press.

    Args:
        book: The runs.
        start: Called with a run, the change to its job, and whether the change has waited, to start the changed job.
    """

    def __init__(self, book: RunBook, start: Callable[[Run, Mapping[str, Any], bool], None]) -> None:
        self.waiting: Queued | None = None
        self.note = ""
        self._book, self._start = book, start
        self._stopped: set[str] = set()

    def holds(self, run: Run, change: Mapping[str, Any] | None = None) -> bool:
        """Return whether a change of this run is waiting: this one, or any if it is None."""
        return (
            self.waiting is not None
            and self.waiting.run.id == run.id
            and change in (None, self.waiting.change)
        )

    def press(self, run: Run, change: Mapping[str, Any], *, is_busy: bool) -> None:
        """Cancel this change if it is waiting; otherwise queue it, or start it if nothing else is in progress.

        Args:
            run: The run.
            change: The change to its job.
            is_busy: Whether something other than a run, such as a check, uses the machine.
        """
        replaced, self.note, is_same = self.waiting, "", self.holds(run, change)
        self.waiting = None
        if is_same:
            return
        if replaced is not None and replaced.run.id != run.id:
            self.note = f"The change of {self._label(replaced.run)} is no longer queued."
        entry = self._book.entries.get(run.id)
        self.waiting = Queued(run, change, entry is not None and entry.is_alive)
        self._advance(is_busy=is_busy, has_waited=False)

    def expect_stop(self, run: Run) -> None:
        """Let a change of this run start also once the run is stopped, as the user has asked for it."""
        self._stopped.add(run.id)

    def update(self, *, is_busy: bool) -> None:
        """Start the waiting change if its turn has come, or cancel it."""
        self._advance(is_busy=is_busy, has_waited=True)

    def _advance(self, *, is_busy: bool, has_waited: bool) -> None:
        if self.waiting is None:
            return
        run, change, awaits_end = self.waiting
        entry = self._book.entries.get(run.id)
        if entry is not None and entry.is_alive:
            return
        ends = {"completed", "stopped"} if run.id in self._stopped else {"completed"}
        if entry is None or (awaits_end and entry.state not in ends):
            end = "was deleted" if entry is None else _ENDS.get(entry.state, "has ended")
            self.waiting, self.note = None, f"The change was not run, because {self._label(run)} {end}."
            return
        self._book.find()  # another lab may have started a run since
        if not is_busy and not any(each.is_alive for each in self._book.entries.values()):
            self.waiting = None
            self._start(run, change, has_waited)

    def _label(self, run: Run) -> str:
        entry = self._book.entries.get(run.id)
        return run.name if entry is None else entry.trace.label
