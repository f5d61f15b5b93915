"""The runs in a folder: those that can be read, and the reasons why others cannot.

A folder of runs may be shared with other users, and may contain copies, leftovers and corrupt runs. One bad run
directory never hides a good one: unreadable runs are skipped, counted and listed with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from shardscope.errors import RunUnreadable
from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import RunDir, holds_run, runs_root
from shardscope.runtime.record.status import printable
from shardscope.show import Sentences, Table, html
from shardscope.spec import Job
from shardscope.spec.units import plural

_NAMED = 3
"""Maximum number of skipped runs that the note names; further runs are only counted."""
_SHOWN = 20
"""Maximum number of runs in the table that a notebook shows."""
_LONGEST_REASON = 160
"""Maximum length of a reason in the note, in characters; longer reasons are shortened."""


class Skipped(NamedTuple):
    """A run that cannot be read, and the reason."""

    name: str
    reason: str


class Runs(list[Run]):
    """List of runs, newest first.

    Attributes:
        skipped: Runs in the same folder that cannot be read, with the reason.
    """

    def __init__(self, found: Iterable[Run] = (), skipped: Iterable[Skipped] = ()) -> None:
        super().__init__(found)
        self.skipped = tuple(skipped)

    @property
    def note(self) -> str:
        """One line about the runs that could not be read; empty if all could be read."""
        return note_on(self.skipped)

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *filter(None, [self.note])])

    def _repr_html_(self) -> str:
        rows = [
            [
                run.id,
                run.state_text,
                run.job.strategy.label,
                str(run.job.world_size),
            ]
            for run in self[:_SHOWN]
        ]
        more = f"{plural(len(self) - _SHOWN, 'older run')}." if len(self) > _SHOWN else ""
        table = Table(
            ["run", "state", "strategy", "ranks"],
            rows,
            num_left=3,
            more=" ".join(filter(None, [more, self.note])),
        )
        return html([table if rows else Sentences(["No runs.", *filter(None, [self.note])], is_titled=False)])


def runs(root: str | Path | None = None, *, all: bool = False, group: str | None = None) -> Runs:  # noqa: A002
    """Return the runs in the folder `root`, newest first.

    A run directory that is corrupt, or private to another user, is left out; ``runs().skipped`` lists these runs with
    the reason.

    Args:
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        all: Whether to include the runs that tools launched for measurements of their own (`Run.made_by`), such as
            those of ``ss.check``.
        group: Only the runs of this group (`Run.group`); None returns those of all groups.
    """
    folder = runs_root(root)
    found: list[tuple[float, str, Run]] = []
    skipped: list[Skipped] = []
    for path in _entries(folder, skipped):
        try:
            if not holds_run(path):
                continue
            run, age = _read(path)
        except RunUnreadable as error:
            skipped.append(Skipped(_name(path.name), _reason(error, path)))
        else:
            if (all or run.made_by is None) and group in (None, run.group):
                found.append((age, run.id, run))
    found.sort(key=lambda row: row[:2], reverse=True)
    return Runs((run for *_, run in found), skipped)


def _name(name: str) -> str:
    """Return a folder's name on one line, with unprintable characters escaped."""
    return " ".join(printable(name).split())


def _reason(error: RunUnreadable, path: Path) -> str:
    """Return why a run is skipped, without the run's name, which the note shows first."""
    name = printable(path.name)
    return str(error).removeprefix(f"run {name} cannot be read: ").removeprefix(f"{printable(str(path))} is ")


def note_on(skipped: Iterable[Skipped]) -> str:
    """Return one line about runs that could not be read; empty if there are none."""
    told = [f"{one.name} ({shorten(one.reason, _LONGEST_REASON)})" for one in skipped]
    if not told:
        return ""
    named = "; ".join(told[:_NAMED])
    more = len(told) - _NAMED
    count = f"{plural(len(told), 'run')} could not be read: "
    return count + named + (f"; and {more} more" if more > 0 else "")


def _entries(folder: Path, skipped: list[Skipped]) -> Iterator[Path]:
    """Yield the folders in `folder`, and links to folders; add unreadable entries to `skipped`."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if _is_folder(entry):
                        yield Path(entry.path)
                except OSError as error:  # a link to a folder without access, or to a name that is too long
                    skipped.append(Skipped(_name(entry.name), f"cannot be read ({error.strerror})"))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        skipped.append(Skipped(_name(folder.name), f"{folder} cannot be listed ({error.strerror})"))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return Path(entry).is_dir() if entry.is_symlink() else entry.is_dir(follow_symlinks=False)


def _read(path: Path) -> tuple[Run, float]:
    """Return a run and the modification time of its job file, in Unix seconds.

    Raises:
        RunUnreadable: The run is corrupt, or its name is not printable.
    """
    if not path.name.isprintable():
        raise RunUnreadable("the run's name cannot be printed; rename the folder")
    try:
        about = (path / "job.json").lstat()
    except OSError as error:
        raise RunUnreadable(f"run {path.name} cannot be read: job.json: {error.strerror}") from None
    job = _job(path, (about.st_mtime_ns, about.st_size, about.st_ino))
    return Run(RunDir(path), job), about.st_mtime


@lru_cache(maxsize=4096)
def _job(path: Path, _version: tuple[int, int, int]) -> Job:
    """Return the job of a run, cached until its file changes, because the labs list the runs every two seconds."""
    return RunDir(path).read_job()
