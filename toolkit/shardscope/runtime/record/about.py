"""Information about a run that is not part of its job: group, note, baseline, launching tool, and style in labs.

It is stored in `about.json`, may change after the launch, and does not affect whether two runs have the same job.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shardscope.errors import RunUnreadable, SpecError, quoted
from shardscope.runlog.files import read_json

if TYPE_CHECKING:
    from shardscope.runtime.record.rundir import RunDir

FILE = "about.json"
_LONGEST = {"group": 80, "note": 2000, "baseline": 255, "made_by": 80, "label": 255, "look": 40}


@dataclass(frozen=True)
class About:
    """Content of `about.json`; a field is empty if nothing is known.

    `label` and `look` are the name, and the colour and dash, that a lab gave the run, for the next lab to show.
    """

    group: str = ""
    note: str = ""
    baseline: str = ""
    made_by: str = ""
    label: str = ""
    look: str = ""

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
    """Return the stored information about the run in a directory; empty if the file is missing or corrupt."""
    try:
        stat = (path / FILE).lstat()
        return _read(path / FILE, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    except OSError:
        return About()


def write_about(folder: RunDir, **changes: str | None) -> None:
    """Change the stored information about the run in a directory; fields that are not given are kept.

    Raises:
        SpecError: A field is not text, or too long, or a name is not printable.
        OSError: The directory cannot be written.
    """
    new = asdict(About.checked(**changes))
    folder.write_json(
        FILE, replace(read_about(folder.path), **{name: new[name] for name in changes}).fields()
    )


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
