"""Writer of one rank's event log: one JSON object per line. The log stays readable after a `kill -9` at any time.

A line is written by a single `write` to a file opened for appending, so a killed rank leaves at most one incomplete
line, which readers skip. Events are not buffered in the process: each is passed to the operating system at once.
"""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any, Self

from shardscope.runlog import clock
from shardscope.runlog.schema import SCHEMA

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def _finite(value: Any) -> Any:
    """Replace non-finite numbers, which JSON cannot represent, with the strings ``"nan"``, ``"inf"`` and ``"-inf"``."""
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
    """Writer that appends events to ``rank-N.jsonl``, and can be used by several threads at once.

    Args:
        path: The log file; a new file is readable and writable by its owner only.
        rank: The rank, which is written into every event.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._file = os.open(path, _APPEND, 0o600)
        self._lock = threading.Lock()
        self._preamble: dict[str, Any] = {"schema": SCHEMA}
        self._torn = os.fstat(self._file).st_size > 0  # an earlier process may have been killed in mid-line

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event. The first event of a writer also states the schema version.

        Args:
            event: Kind of the event.
            **fields: Fields of the event.

        Raises:
            OSError: The disk is full or unavailable.
        """
        with self._lock:
            common = {"event": event, "t": round(clock.now(), 6), "rank": self.rank, **self._preamble}
            self._write(encode({**common, **fields}))
            self._preamble = {}

    def _write(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        self._torn = True  # until the last byte is written
        written = 0
        while written < len(line):
            written += os.write(self._file, line[written:])
        self._torn = False

    def close(self) -> None:
        """Close the file; after that, writing an event raises an error."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
