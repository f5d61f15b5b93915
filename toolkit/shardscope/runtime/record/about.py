"""What people and tools say about a run, beside its job: group, note, baseline, and the tool that launched it.

All of it is in `about.json`.
These may change after the launch, and are not part of the job: two runs of one job in two groups are runs of one job.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shardscope.errors import RunUnreadable, SpecError, quoted
from shardscope.runlog.files import read_json
from shardscope.runtime.record.launch_prediction import LaunchPrediction
from shardscope.runtime.record.run_part import RunPart
from shardscope.spec.job_parts import label_of

if TYPE_CHECKING:
    from shardscope.runlog.summary import Summary
    from shardscope.spec.faults import Faults

FILE = "about.json"
_LONGEST = {"group": 80, "note": 2000, "baseline": 255, "made_by": 80}


@dataclass(frozen=True)
class About:
    """Content of `about.json`; a field is empty if nothing is known."""

    group: str = ""
    note: str = ""
    baseline: str = ""
    made_by: str = ""

    @classmethod
    def checked(cls, **fields: str | None) -> Self:
        """Return the content with these fields; None stands for empty.

        Raises:
            SpecError: A field is not text, or too long, or a name is not printable.
        """
        for name, value in fields.items():
            longest = _LONGEST[name]
            if value is not None and not isinstance(value, str):
                raise SpecError(f"{name}={quoted(value)} is not text; give a string, or None for none")
            if value and len(value) > longest:
                raise SpecError(f"{name} has {len(value)} characters; use at most {longest}")
            if value and name != "note" and not value.isprintable():
                raise SpecError(f"{name}={quoted(value)} has unprintable characters; leave them out")
        return cls(**{name: (value or "").strip() for name, value in fields.items()})

    def fields(self) -> dict[str, str]:
        """Return the fields that are not empty, for JSON."""
        return {name: value for name, value in asdict(self).items() if value}


def read_about(path: Path) -> About:
    """Return what is known about the run in a directory; empty if the file is missing or damaged."""
    try:
        stat = (path / FILE).lstat()
        return _read(path / FILE, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    except OSError:
        return About()


@lru_cache(maxsize=4096)
def _read(file: Path, _version: tuple[int, int, int]) -> About:
    try:
        value = read_json(file)
    except RunUnreadable:
        return About()
    known: dict[str, Any] = value if isinstance(value, dict) else {}
    texts = {name: known[name] for name in asdict(About()) if isinstance(known.get(name), str)}
    try:
        return About.checked(**texts)
    except SpecError:
        return About()


class Described(RunPart):
    """The part of a `Run` that reads and changes the small files beside its job, and deletes the run."""

    @property
    def group(self) -> str:
        """Group of the run: the one given at its launch or set here, else model and data.

        Only runs of one group share a plot in the labs. Setting it to None or an empty string groups the run by model
        and data again.
        """
        return read_about(self._dir.path).group or f"{label_of(self.job.model)} on {label_of(self.job.data)}"

    @group.setter
    def group(self, name: str | None) -> None:
        self._write_about(group=name)

    @property
    def note(self) -> str:
        """Your note on the run; empty if there is none. Stored in the run directory, beside the job."""
        return read_about(self._dir.path).note

    @note.setter
    def note(self, text: str | None) -> None:
        self._write_about(note=text)

    @property
    def baseline(self) -> str | None:
        """Id of the run that this run is compared with, such as the one whose suggested change it tries; else None."""
        return read_about(self._dir.path).baseline or None

    @baseline.setter
    def baseline(self, run_id: str | None) -> None:
        self._write_about(baseline=run_id)

    @property
    def made_by(self) -> str | None:
        """Name of the tool that launched the run for a measurement of its own, such as ``check``; None for yours."""
        return read_about(self._dir.path).made_by or None

    @property
    def faults(self) -> Faults:
        """The plan of faults that the run was launched with; empty if it has none."""
        return self._dir.read_faults()

    @property
    def predicted(self) -> LaunchPrediction | None:
        """The step time predicted when the run was launched; None if it was not, as on GPUs or for one's own model."""
        return LaunchPrediction.of_run(self._dir)

    @property
    def stored_summary(self) -> Summary | None:
        """Summary that was written when the run ended, without reading the events; None if there is none.

        `Run.summary` computes it from the events.
        """
        return self._dir.read_summary()

    def _write_about(self, **changes: str | None) -> None:
        """Change fields of `about.json`.

        Raises:
            RunUnreadable: The run directory cannot be written.
        """
        new = asdict(About.checked(**changes))
        about = replace(read_about(self._dir.path), **{name: new[name] for name in changes})
        try:
            self._dir.write_json(FILE, about.fields())
        except OSError as error:
            raise RunUnreadable(f"run {self.id} cannot be changed: {error.strerror}") from None

    def delete(self) -> None:
        """Delete the run directory with all that the run has recorded; this cannot be undone.

        Raises:
            SpecError: The run has not ended.
            RunUnreadable: The directory cannot be deleted.
        """
        if self.is_alive:
            raise SpecError(f"run {self.id} has not ended; stop it with run.stop(), then delete it")
        try:
            shutil.rmtree(self._dir.path)
        except OSError as error:
            raise RunUnreadable(f"run {self.id} cannot be deleted: {error.strerror}") from None
