"""Read events while they are being written: each complete line is read once, and events are ordered by time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from shardscope.errors import RunUnreadable
from shardscope.runlog.files import OutOfReach, opened, parse_json, read_range
from shardscope.runlog.schema import is_readable, refuse_newer

Event = dict[str, Any]
_LOG = re.compile(r"rank-(0|[1-9][0-9]{0,6})\.jsonl")
LONGEST_LINE = 64 * 2**20
"""Length limit of a line, in bytes. If a line is longer, as a hole in a sparse file is, the log is read only up to that
line."""
_BLOCK = 4 * 2**20
"""Size of the part of each log that is read at a time, in bytes."""
_FIRST_LINE = 4096
_SET_BACK_S = 1.0
"""Minimum time, in seconds, by which an event precedes the previous event of its log if the clock was set back."""


def is_log(name: str) -> bool:
    """Return whether this is the file name of a rank's event log."""
    return _LOG.fullmatch(name) is not None


def log_files(folder: Path) -> list[Path]:
    """Return the existing event logs in a run directory, ordered by rank; empty if the directory cannot be listed."""
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
        num_unreadable: Number of lines so far that are not valid events; a killed rank may leave one such line.
        problems: Reasons why a log cannot be read, or not completely, by name of the log.
    """

    folder: Path
    num_unreadable: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    _offsets: dict[Path, int] = field(default_factory=dict)
    _latest: dict[str, float] = field(default_factory=dict)
    """Latest time read from each log so far, by name of the log, corrected for any setback of its clock."""
    _set_back: dict[str, float] = field(default_factory=dict)
    """Time by which each log's clock was set back at its last event so far, in seconds, by name of the log."""
    _given_up: set[str] = field(default_factory=set)
    _unread: set[Path] = field(default_factory=set)
    """The logs with more data after the last block read."""

    def poll(self) -> list[Event]:
        """Return the events written since the last call, ordered by time.

        Events of one rank stay in the order in which it wrote them, even if its clock was set back in between. Events
        of several ranks are then ordered as if the clock had not been set back.

        Raises:
            RunUnreadable: The events have a newer schema than this version reads.
        """
        new = [keyed for block in self._blocks() for keyed in block]
        new.sort(key=itemgetter(0))
        return [event for _, event in new]

    def batches(self) -> Iterator[list[Event]]:
        """Yield the events written since the last call in batches, each ordered by time, as `poll` does.

        A batch holds at most about `_BLOCK` bytes of each log, so a long run can be reduced without holding all of its
        events in memory.

        Raises:
            RunUnreadable: The events have a newer schema than this version reads.
        """
        for block in self._blocks():
            yield [event for _, event in block]

    def _blocks(self) -> Iterator[list[tuple[float, Event]]]:
        """Yield new events in blocks. Each event has a sort key: the latest time in its log up to this event.

        If the clock is set back, later keys continue from that latest time. Otherwise, all later events of the rank
        would have the same key, and come before those of another rank that had been slightly ahead. Until the clock is
        corrected, the time by which it was set back is known only up to the time between two events.
        """
        paths, ahead = log_files(self.folder), list[tuple[float, Event]]()
        while paths:
            for path in paths:
                latest, set_back = self._latest.get(path.name, 0.0), self._set_back.get(path.name, 0.0)
                for event in self._new_in(path):
                    if event["t"] >= latest:
                        set_back = 0.0  # the clock has been put right, or never was set back
                    elif event["t"] + set_back < latest - _SET_BACK_S:
                        set_back = latest - event["t"]
                    latest = max(latest, event["t"] + set_back)
                    ahead.append((latest, event))
                self._latest[path.name], self._set_back[path.name] = latest, set_back
            ahead.sort(key=itemgetter(0))
            # A log with short lines gets ahead of the others: its newer events wait until these have caught up.
            horizon = min((self._latest[path.name] for path in self._unread), default=math.inf)
            num_due = bisect_right(ahead, horizon, key=itemgetter(0))
            yield ahead[:num_due]
            del ahead[:num_due]
            paths = sorted(path for path in self._unread if self._latest[path.name] <= horizon)

    def _new_in(self, path: Path) -> Iterator[Event]:
        self._unread.discard(path)
        if path.name in self._given_up:
            return
        try:
            lines = self._new_lines(path)
        except (OutOfReach, OSError) as error:
            if not isinstance(error, FileNotFoundError):  # a missing log was deleted after the listing
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
            block = _whole_lines(descriptor, start) if size > start else b""
        self.problems.pop(path.name, None)
        end = self._offsets[path] = start + len(block)
        if start < end < size:
            self._unread.add(path)
        if not block and size - start > LONGEST_LINE:
            self._give_up(
                path, f"{path.name} has a line of more than {LONGEST_LINE:,} bytes; the rest is not read"
            )
        return block.splitlines()


def _out_of_reach(path: Path, error: OSError | OutOfReach) -> str:
    return f"{path.name} cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)


def _whole_lines(descriptor: int, start: int) -> bytes:
    """Return a block of complete lines from offset `start` on; empty if the next line is too long or incomplete."""
    for most in (_BLOCK, LONGEST_LINE):
        block = read_range(descriptor, start, most)
        whole = block.rfind(b"\n") + 1
        if whole or len(block) < most:
            return block[:whole]
    return b""


def _parse(line: bytes, log: str) -> Event | None:
    """Parse a line as an event; return None if the line is truncated (by a killed rank) or is not a valid event.

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
    """Return the events of a run so far, ordered by time; optionally only those of one kind, or of one rank."""
    return select(Tail(folder).poll(), kind, rank)


def first_events(folder: Path) -> list[Event]:
    """Return the first event of each rank, without reading the rest of the logs.

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


def of_last_attempt(events: list[Event]) -> list[Event]:
    """Return the events since the last restart of the ranks; all events if there was none.

    Args:
        events: Events ordered by time.
    """
    begin = max((index for index, event in enumerate(events) if event["event"] == "restart"), default=-1)
    return events[begin + 1 :]
