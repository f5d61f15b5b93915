"""List of runs to choose from, for panels that show one run at a time."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope_widgets.words import plural

if TYPE_CHECKING:
    from shardscope.runtime import Run

MOST_RUNS = 40
"""Largest number of runs that can be chosen, newest first."""
NO_RUNS = "There are no runs yet. Launch one with ss.launch(job), then press “Read again”."


class RunChooser:
    """A list of the runs in a folder, newest first, and a button that reloads the list.

    Args:
        given: A run, or its name or path, to list first; None lists only the runs in the folder.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
    """

    def __init__(self, given: Run | str | Path | None, root: str | Path | None) -> None:
        self._root, self._given = root, _attached(given, root)
        self.runs: dict[str, Run] = {}
        self.control = widgets.Dropdown(description="Run", tooltip="Run to show; the newest is listed first")
        self.again = widgets.Button(description="Read again", icon="refresh")
        self.again.tooltip = "Look for new runs, and read the chosen one up to its newest step"

    @property
    def first(self) -> str:
        """Name of the run to show initially: the given run, else the newest run; empty if there is none."""
        return next(iter(self.runs), "")

    def give(self, run: Run) -> None:
        """List a run first."""
        self._given = run

    def offer(self, chosen: str) -> None:
        """List the runs that are now in the folder, and show which run is chosen."""
        from shardscope.runtime import runs

        found = list(runs(self._root)[:MOST_RUNS])
        given = self._given
        if given is not None:
            found = [given, *(run for run in found if run.id != given.id)]
        self.runs = {run.id: run for run in found}
        self.control.options = [(_label(run), run.id) for run in found] or [("no runs", "")]
        self.mark(chosen)

    def mark(self, chosen: str) -> None:
        """Show which run is chosen, if it is in the list."""
        if chosen in self.runs:
            self.control.value = chosen

    def why_not(self, chosen: str) -> str:
        """Return why there is no run to show."""
        if not self.runs:
            return NO_RUNS
        known = f"There is no run {chosen!r} among the {len(self.runs)} that can be chosen."
        return f"{known} Choose one of them, or give the run or its path."


def _attached(run: Run | str | Path | None, root: str | Path | None) -> Run | None:
    from shardscope.runtime import Run

    return Run.attach(run, root) if isinstance(run, str | Path) else run


def _label(run: Run) -> str:
    return f"{run.name} · {plural(run.job.world_size, 'rank')} · {_when(run.id)}"


def _when(run_id: str) -> str:
    """Return the launch time of a run from the start of its name; the name itself if the run was renamed."""
    try:
        return f"{datetime.strptime(run_id[:15], '%Y%m%d-%H%M%S'):%d %b %H:%M}"  # noqa: DTZ007 - local time, shown as it is
    except ValueError:
        return run_id
