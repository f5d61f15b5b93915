"""A study's journal on disk: Optuna's, safe against a writer that is killed at any byte.

Optuna's own lock is a link that a killed holder leaves behind, and its file may end in half a line, which the next
writer would continue. Here the kernel holds a second lock, which ends with its holder, and whoever writes next cuts a
torn line off first. Nothing is lost by that: a line that was not written whole was never acknowledged. Readers hold it
too, together, so that no line is cut under their eyes. A disk that is full is an outage like another. The file stays
one that Optuna's dashboard opens and writes to.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from optuna.exceptions import StorageInternalError
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from shardscope.errors import StudyError

_BLOCK = 1 << 16
_LEFT_BEHIND_S = 5
"""How old Optuna's link is when it counts as left by a killed holder: writing takes milliseconds."""


class SafeJournal(JournalFileBackend):
    """The journal file at `path`, made private to the user if it is new."""

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._journal = path
        super().__init__(str(path), lock_obj=JournalFileSymlinkLock(str(path), grace_period=_LEFT_BEHIND_S))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write whole lines behind the last whole line."""
        try:
            with self._locked(fcntl.LOCK_EX):
                _cut_torn_line(self._journal)
                super().append_logs(logs)
        except OSError as error:
            raise StorageInternalError(f"{self._journal} cannot be written: {error.strerror}") from error

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """What was written behind a line of this number, all of it before the first is given."""
        with self._locked(fcntl.LOCK_SH):
            logs = list(super().read_logs(log_number_from))
        yield from logs

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        try:
            file = os.open(
                self._journal.with_name(f".{self._journal.name}.alone"), os.O_RDWR | os.O_CREAT, 0o600
            )
        except FileNotFoundError:  # waiting, as for a disk that is full, would bring nothing back
            raise StudyError(
                f"the folder {self._journal.parent} is gone, and with it its study; put it back or begin the study anew"
            ) from None
        try:
            fcntl.flock(file, how)
            yield
        finally:
            os.close(file)


def _cut_torn_line(path: Path) -> None:
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _end_of_last_line(file, size)
        if whole < size:
            file.truncate(whole)


def _end_of_last_line(file: BinaryIO, end: int) -> int:
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
