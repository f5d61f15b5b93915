"""Clock of a run: a monotonic clock in Unix seconds, which is the same in all processes of a run on one host.

The system's wall clock may jump during a run, when NTP corrects it or when it is set by hand. All times of a run are
therefore those of the monotonic clock plus an offset to Unix time, so that a duration is the difference of two times,
also of two processes: on Linux and macOS, all processes of a host have the same monotonic clock. The agent measures the
offset when it starts, and passes it to its ranks in an environment variable. Ranks on other hosts keep their own
offset, so their times are aligned only as well as the wall clocks of the hosts. Ranks that torchrun starts measure an
offset of their own at each start. On Linux and macOS, the monotonic clock stands still while the system sleeps:
durations exclude that time, and later times lag behind Unix time.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "SHARDSCOPE_CLOCK"
"""Environment variable with the agent's offset, for its ranks."""
_offset = time.time() - time.perf_counter()


def now() -> float:
    """Return the current time in Unix seconds; it never decreases once the run has started."""
    return _offset + time.perf_counter()


def start(env: MutableMapping[str, str] = os.environ) -> None:
    """Measure the offset to the wall clock, at the start of a run, and pass it to the processes that are started with
    this `env`.
    """
    global _offset  # noqa: PLW0603 - a process has one clock
    _offset = time.time() - time.perf_counter()
    env[VARIABLE] = offset_text()


def offset_text() -> str:
    """Return the offset of this process and its host, as `adopt` takes it."""
    return json.dumps([_host(), _offset])


def adopt(text: str | bytes | None) -> None:
    """Adopt the offset of another process if that process is on this host."""
    global _offset  # noqa: PLW0603 - a process has one clock
    if text is not None:
        host, offset = json.loads(text)
        if host == _host():
            _offset = offset


def _host() -> str:
    """Return an identifier of the host and its current boot: processes with the same identifier share a monotonic
    clock.
    """
    return boot_id() or socket.gethostname()


def boot_id() -> str:
    """Return the identifier of this machine's boot, the same in all its containers; empty if the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
