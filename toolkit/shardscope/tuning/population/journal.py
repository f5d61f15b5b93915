"""The journal of a population: one JSON object a line, whole lines only, by one writer at a time.

A line is one `write` to a file opened for appending, and on disk before anything is done because of it. A kill leaves
at most one torn line at the end: readers skip it, and the next writer begins a line of its own. The writer holds a lock
that the system takes off it when it dies, however it dies.
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

from shardscope.training.events import encode
from shardscope.tuning.population.record import PopulationError

NAME = "journal.jsonl"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal, in order; none if it is not there."""
    text = path.read_bytes() if path.is_file() else b""
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        with contextlib.suppress(ValueError):  # torn by a kill, and ended by the next writer
            found = json.loads(line)
            if isinstance(found, dict) and "event" in found:
                yield found


def is_held(path: Path) -> bool:
    """Whether somebody writes this journal now."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Journal:
    """Appends lines, as the only one who does.

    Raises:
        PopulationError: Somebody else writes it.
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
            OSError: The disk is full or gone.
        """
        text = encode({"t": round(time.time(), 6), **line})
        while text:
            text = text[os.write(self._file, text) :]
        os.fsync(self._file)

    def close(self) -> None:
        """Let another write it."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
