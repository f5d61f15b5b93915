"""Read events while they are being written: complete lines only, each once, ordered by time."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardscope.errors import RunUnreadable
from shardscope.runlog.files import OutOfReach, opened, parse_json, read_range
from shardscope.runlog.schema import is_readable, refuse_newer

Event = dict[str, Any]
_LOG = re.compile(r"rank-(0|[1-9][0-9]{0,3})\.jsonl")
LONGEST_LINE = 64 * 2**20
"""Largest event, in bytes. After a longer line, such as a hole in a sparse file, the rest of the log is not read."""
_FIRST_LINE = 4096


def is_log(name: str) -> bool:
    """Return whether this is the file name of a rank's event log."""
    return _LOG.fullmatch(name) is not None


def log_files(folder: Path) -> list[Path]:
    """Return the existing event logs in a run directory, ordered by rank; empty if it cannot be listed."""
    try:
        found = [(int(match[1]), name) for name in os.listdir(folder) if (match := _LOG.fullmatch(name))]
    except OSError:
        return []
    return [folder / name for _, name in sorted(found)]


@dataclass
class Tail:
    """Incremental reader of a run's event logs. Polling is cheap: only new data are read.

    Attributes:
        folder: The run directory.
        num_unreadable: Number of lines so far without a valid event; a killed rank may leave one.
        problems: Sentences on why a log cannot be read, or not to its end, by the name of the log.
    """

    folder: Path
    num_unreadable: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    _offsets: dict[Path, int] = field(default_factory=dict)
    _given_up: set[str] = field(default_factory=set)

    def poll(self) -> list[Event]:
        """Return the events written since the last call, ordered by time.

        Raises:
            RunUnreadable: The events have a newer schema than this version reads.
        """
        new = [event for path in log_files(self.folder) for event in self._new_in(path)]
        new.sort(key=lambda event: event["t"])
        return new

    def _new_in(self, path: Path) -> Iterator[Event]:
        if path.name in self._given_up:
            return
        try:
            lines = self._new_lines(path)
        except (OutOfReach, OSError) as error:
            if not isinstance(error, FileNotFoundError):  # otherwise it was deleted after it was listed
                self.problems[path.name] = _out_of_reach(path, error)  # temporary: the next poll tries again
            return
        except RunUnreadable as error:
            self._give_up(path, str(error))
            return
        name = path.name
        try:
            for line in lines:
                event = _parse(line, name)
                if event is not None:
                    yield event
                elif line:
                    self.num_unreadable += 1
        except RunUnreadable:  # a newer schema, which every poll rejects
            del self._offsets[path]
            raise

    def _give_up(self, path: Path, why: str) -> None:
        self._given_up.add(path.name)
        self.problems[path.name] = why

    def _new_lines(self, path: Path) -> list[bytes]:
        start = self._offsets.get(path, 0)
        with opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            lines, used = _whole_lines(descriptor, start) if size > start else ([], 0)
        self.problems.pop(path.name, None)
        self._offsets[path] = start + used
        if size - start - used > LONGEST_LINE:
            self._give_up(
                path, f"{path.name} has a line of more than {LONGEST_LINE:,} bytes; the rest is left out"
            )
        return lines


def _out_of_reach(path: Path, error: OSError | OutOfReach) -> str:
    return f"{path.name} cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)


def _whole_lines(descriptor: int, start: int) -> tuple[list[bytes], int]:
    """Return the complete lines from `start` on, up to the first that is too long, and their total size in bytes."""
    lines: list[bytes] = []
    used = 0
    while block := read_range(descriptor, start + used, LONGEST_LINE):
        whole = block.rfind(b"\n") + 1
        lines += block[:whole].splitlines()
        used += whole
        if len(block) < LONGEST_LINE or not whole:
            break
    return lines, used


def _parse(line: bytes, log: str) -> Event | None:
    """Parse a line as an event; return None if it is truncated (by a killed rank) or its event is not valid.

    Raises:
        RunUnreadable: The event has a newer schema than this version reads.
    """
    try:
        event = parse_json(line)
        if (
            b"\\u" in line and b"\\ud" in line.lower()
        ):  # reject a lone surrogate, which can only come from an escape
            json.dumps(event, ensure_ascii=False).encode()
    except ValueError:
        return None
    refuse_newer(event, log)
    return event if is_readable(event) else None


def read_events(folder: Path, kind: str | None = None, rank: int | None = None) -> list[Event]:
    """Return all events of a run so far, ordered by time, or only those of one kind or one rank."""
    return select(Tail(folder).poll(), kind, rank)


def first_events(folder: Path) -> list[Event]:
    """Return the first event of each rank, without reading the rest of its log.

    Raises:
        RunUnreadable: The events have a newer schema than this version reads.
    """
    found = []
    for path in log_files(folder):
        line = b""
        with contextlib.suppress(OSError, RunUnreadable), opened(path) as descriptor:
            line = read_range(descriptor, 0, _FIRST_LINE).partition(b"\n")[0]
        event = _parse(line, path.name)
        if event is not None:
            found.append(event)
    return found


def select(events: list[Event], kind: str | None, rank: int | None) -> list[Event]:
    """Return the events of one kind (None: all kinds) and one rank (None: all ranks)."""
    return [
        event for event in events if kind in (None, event["event"]) and rank in (None, event["rank"])
    ]  # fmt: skip
