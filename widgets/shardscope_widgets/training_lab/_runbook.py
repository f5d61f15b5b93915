"""The list of runs on disk, with a trace for each run.

Runs are stored in directories and outlive the kernel, so the list is always read with `shardscope.runs`. After a
page reload or a kernel restart, the list has the same runs, and those that are still running are followed again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from shardscope.errors import SpecError
from shardscope.methods.strategies.pipeline import with_split
from shardscope.runtime.record.about import read_about, write_about
from shardscope.runtime.record.rundir import RunDir
from shardscope.spec.look import DASHES
from shardscope.spec.run_names import RunLook, run_looks, run_names
from shardscope.spec.settings import settings_of
from shardscope_widgets.trace import Trace

if TYPE_CHECKING:
    from shardscope.runlog.summary import Summary
    from shardscope.runtime import Run
    from shardscope.runtime.record.launch_prediction import LaunchPrediction
    from shardscope.runtime.record.listing import Skipped
    from shardscope.spec import Job
    from shardscope.spec.cluster import EmulatedCluster

_MOST_STORED = 40
"""Number of newest runs whose name and look are stored: those that a lab lists."""
_MOST_COMPARED = 8
"""Maximum number of runs among which the name and line style of a new run are made distinct."""


def busy_load(num_ranks: int) -> float:
    """Return the machine's load if it is larger than that of one run with `num_ranks` ranks; else 0."""
    load = psutil.getloadavg()[0]
    return 0.0 if load < num_ranks + 1 else load


@dataclass
class RunEntry:
    """One run: its handle, its trace, and its state at the last poll."""

    run: Run
    trace: Trace
    state: str = ""
    tail: Any = None
    busy_load: float = 0.0
    """Load of the machine when other programs were last seen to keep it busy during the run; 0 if never."""
    problem: Skipped | None = None
    """Why the run can no longer be read; None if it can be read."""
    _predicted: dict[bool, LaunchPrediction | None] = field(default_factory=dict)
    _stored: tuple[str, str] | None = None

    @cached_property
    def stored(self) -> Summary | None:
        """Summary that was written when the run ended, used if the run's events have not been read."""
        return self.run.stored_summary

    @cached_property
    def cluster(self) -> EmulatedCluster | None:
        """The run's emulated cluster; None if it runs on this machine."""
        return self.run.cluster

    @property
    def predicted(self) -> LaunchPrediction | None:
        """Prediction made at launch and, once the run has ended, the machine's load at its end."""
        if self.is_alive not in self._predicted:
            self._predicted[self.is_alive] = self.run.predicted
        return self._predicted[self.is_alive]

    @property
    def loss(self) -> float | None:
        """Loss of the last finished step; None if it is unknown."""
        if self.trace.steps or self.is_alive:
            return self.trace.loss
        return self.stored.loss if self.stored else None

    @property
    def diverged_at(self) -> int | None:
        """First step at which the loss had diverged; None if it has not diverged."""
        if self.trace.steps or self.is_alive:
            found = self.trace.divergence
            return None if found is None else found.step
        return self.stored.diverged_at if self.stored else None

    @property
    def last_step(self) -> int:
        """The last finished step; 0 before the first step has finished."""
        if self.trace.steps or self.is_alive:
            return self.trace.last_step
        return self.stored.last_step if self.stored else 0

    @property
    def is_alive(self) -> bool:
        """Whether the run was starting or running at the last poll."""
        return self.state in {"starting", "running"}

    @cached_property
    def stored_label(self) -> str:
        """The name that an earlier lab gave the run; empty if none did. Also restores the stored look."""
        about = read_about(self.run.path)
        self._stored = about.label, about.look
        colour, _, place = about.look.partition(" ")
        if re.fullmatch("#[0-9a-fA-F]{6}", colour) and place.isdecimal():  # a folder may hold anything
            self.trace.look = RunLook(colour, int(place) % len(DASHES))
        return about.label

    def store(self) -> None:
        """Store the name and the look of the run for later labs, unless its directory cannot be written."""
        look = self.trace.look
        now = self.trace.label, "" if look is None else f"{look.colour} {look.place}"
        if now != self._stored:
            self._stored = now
            with suppress(OSError, SpecError):
                write_about(RunDir(self.run.path), label=now[0], look=now[1])

    def poll(self) -> bool:
        """Read new events; return whether anything visible has changed."""
        before, self.state = (
            self.state,
            self.run.state,
        )  # read the state first, so that no event before the end is missed
        if self.is_alive:
            self.busy_load = busy_load(self.trace.world_size) or self.busy_load
        if self.tail is None:
            self.tail = self.run.tail()
        elif before == self.state and not self.is_alive:
            return False
        return self.trace.feed(self.tail.poll()) or before != self.state


@dataclass
class RunBook:
    """The runs in a folder: entries by run id, oldest first; a `root` of None is the default folder."""

    root: Path | None = None
    entries: dict[str, RunEntry] = field(default_factory=dict)
    shows_tools: bool = False
    """Whether to include the runs that tools launched for measurements of their own, such as checks."""
    _named: set[str] = field(default_factory=set)
    skipped: str = ""
    """One line about the runs that could not be read; empty if all could be read."""

    def find(self) -> bool:
        """Update `entries` and `skipped` from the runs on disk; return whether either has changed."""
        from shardscope.runtime import runs
        from shardscope.runtime.record.listing import note_on

        before = (list(self.entries), self.skipped, self.groups)
        found = runs(self.root, all=self.shows_tools)
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
        for entry in entries.values():
            entry.trace.group = entry.run.group
        return before != (list(self.entries), self.skipped, self.groups)

    def add(self, run: Run) -> RunEntry:
        """Add a run that has just been started; unlike one read from disk, it knows the user's functions."""
        entry = self.entries.get(run.id) or RunEntry(run, Trace.of(run), run.state)
        entry.run = run
        self.entries[run.id] = entry
        return entry

    def poll(self, run_ids: Iterable[str]) -> set[str]:
        """Read new events of these runs and of all live runs; return the ids of the runs that have changed."""
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

    @property
    def groups(self) -> dict[str, int]:
        """Number of runs by group, starting with the group of the newest run."""
        counts: dict[str, int] = {}
        for entry in reversed(self.entries.values()):
            counts[entry.trace.group] = counts.get(entry.trace.group, 0) + 1
        return counts

    def of_group(self, group: str) -> dict[str, RunEntry]:
        """Return the runs of a group, oldest first."""
        return {run_id: entry for run_id, entry in self.entries.items() if entry.trace.group == group}

    def _recall(self) -> None:
        """Give runs the names that an earlier lab gave them, unless another run of the group already has the name."""
        named = {
            (e.trace.group, e.trace.label) for run_id, e in self.entries.items() if run_id in self._named
        }
        for run_id, entry in self.entries.items():
            name = entry.trace.group, entry.stored_label
            if run_id not in self._named and entry.stored_label and name not in named:
                entry.trace.label = entry.stored_label
                self._named.add(run_id)
                named.add(name)

    def name(self, shown: Sequence[str]) -> None:
        """Name the runs of each group by their differences, and give the shown runs a colour and a dash.

        A run that tries a change of another run is compared only with that run, and a run of the same job as an earlier
        one has its name with a number. A run keeps its name. It also keeps its look, unless an earlier shown run has
        the same look. Both are stored beside the run, so that the next lab shows the same.

        Args:
            shown: Ids of the shown runs, in their order in legend and table.
        """
        self._recall()
        new = [entry for run_id, entry in self.entries.items() if run_id not in self._named]
        for group in dict.fromkeys(entry.trace.group for entry in new):
            fresh = [entry for entry in new if entry.trace.group == group]
            known = [entry for run_id, entry in self.of_group(group).items() if run_id in self._named]
            labels = _labels(fresh, known)
            taken = {entry.trace.label for entry in known}
            for entry, label in zip(fresh, labels, strict=True):
                choices = chain([label], (f"{label} ({number})" for number in count(2)))
                entry.trace.label = next(name for name in choices if name not in taken)
                taken.add(entry.trace.label)
                self._named.add(entry.run.id)
        chosen = [self.entries[run_id] for run_id in shown if run_id in self.entries]
        kept: list[RunLook | None] = []
        for entry in chosen:
            kept.append(None if entry.trace.look in kept else entry.trace.look)
        others = [entry for run_id, entry in self.entries.items() if run_id not in shown and entry.trace.look]
        others = others[len(others) - max(0, min(len(others), _MOST_COMPARED - len(chosen))) :]
        drawn = [*others, *chosen]
        looks = run_looks(
            [entry.trace.strategy for entry in drawn], [*(entry.trace.look for entry in others), *kept]
        )
        for entry, look in zip(drawn, looks, strict=True):
            entry.trace.look = look
        for entry in [*self.entries.values()][-_MOST_STORED:]:
            entry.store()


def _labels(fresh: Sequence[RunEntry], known: Sequence[RunEntry]) -> list[str]:
    """Return names for new runs of a group; the name of a known run for another run of its job.

    Args:
        fresh: The new runs, oldest first.
        known: The named runs of the group, oldest first.
    """
    beside = known[-_MOST_COMPARED:]
    labels = run_names([_split_job(entry) for entry in (*beside, *fresh)])[len(beside) :]
    for index, entry in enumerate(fresh):
        same = next((each for each in known if _is_same_job(each, entry)), None)
        base = next((each for each in (*known, *fresh) if each.run.id == entry.run.baseline), None)
        if same is not None:
            labels[index] = re.sub(r" \(\d+\)$", "", same.trace.label)
        elif base is not None and entry.run.job.name is None:
            labels[index] = run_names(
                [_split_job(base).model_copy(update={"name": None}), _split_job(entry)]
            )[1]
    return labels


def _split_job(entry: RunEntry) -> Job:
    """Return a run's job with the split that its ranks measured, if they have."""
    return with_split(entry.run.job, entry.trace.split)


def _is_same_job(one: RunEntry, other: RunEntry) -> bool:
    """Return whether two runs have the same job, as asked for or with the split that their ranks measured."""
    jobs = [(each.run.job, _split_job(each)) for each in (one, other)]
    return any(settings_of(first) == settings_of(second) for first, second in zip(*jobs, strict=True))


def _skipped(run: Run, error: Exception) -> Skipped:
    from shardscope.runtime.record.listing import Skipped

    return Skipped(run.id, f"{type(error).__name__}: {error}")
