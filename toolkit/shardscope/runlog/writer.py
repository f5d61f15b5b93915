"""The event log of one rank: one JSON object per line, only complete lines, safe against `kill -9` at any byte.

A line is written by a single `write` to a file opened for appending, so a killed rank leaves at most one partial line
at the end, which readers skip. Nothing is buffered in the process: each event is passed to the system as it happens.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardscope.runlog.schema import SCHEMA

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def _finite(value: Any) -> Any:
    """Replace non-finite numbers, which JSON lacks, with the strings ``"nan"``, ``"inf"``, ``"-inf"``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def encode(event: dict[str, Any]) -> bytes:
    """Encode an event as one line of strict JSON."""
    try:
        text = json.dumps(event, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(event), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


class EventWriter:
    """Appends events to ``rank-N.jsonl``. Safe to use from several threads.

    Args:
        path: The log file; if it is new, it is readable and writable by the user only.
        rank: Rank that is written into every event.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._file = os.open(path, _APPEND, 0o600)
        self._lock = threading.Lock()
        self._preamble: dict[str, Any] = {"schema": SCHEMA}
        self._torn = os.fstat(self._file).st_size > 0  # an earlier process may have been killed in mid-line

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event; the first one also states the version of the schema.

        Args:
            event: Kind of the event.
            **fields: Fields of the event.

        Raises:
            OSError: The disk is full or unavailable.
        """
        preamble, self._preamble = self._preamble, {}
        self._write(
            encode({"event": event, "t": round(time.time(), 6), "rank": self.rank, **preamble, **fields})
        )

    def _write(self, line: bytes) -> None:
        with self._lock:
            if self._torn:
                line = b"\n" + line
            self._torn = True  # until the last byte is written
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            self._torn = False

    def close(self) -> None:
        """Close the file; writing an event after that raises an error."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
