"""The journal of a population: one JSON object per line, complete lines only, one writer at a time.

A line is appended and synced to disk before anything depends on it. A kill leaves at most one partial line at the end:
readers skip it, and the next writer starts a new line. The writer holds a lock that the operating system releases when
the process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from shardscope.runlog.writer import encode
from shardscope.tuning.population.record import PopulationError

NAME = "journal.jsonl"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a journal, in order; none if the file does not exist."""
    text = path.read_bytes() if path.is_file() else b""
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        with contextlib.suppress(ValueError):  # a partial line from a killed writer, ended by the next writer
            found = json.loads(line)
            if isinstance(found, dict) and "event" in found:
                yield found


def is_held(path: Path) -> bool:
    """Return whether a process has this journal open for writing."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Journal:
    """Exclusive writer of a population's journal.

    Args:
        path: File of the journal; created if it does not exist.

    Raises:
        PopulationError: Another process holds the journal's lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise PopulationError(
                f"the population in {path.parent} is being trained by another process; wait for it, or stop it with "
                "ss.Population(folder).stop()"
            ) from None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line, and wait until it is on disk.

        Raises:
            OSError: The disk is full or missing.
        """
        text = encode({"t": round(time.time(), 6), **line})
        while text:
            text = text[os.write(self._file, text) :]
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file, which releases the lock."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
