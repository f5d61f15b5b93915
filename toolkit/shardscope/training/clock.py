"""The clock of all spans: a monotonic clock that reads Unix seconds, the same on all ranks of a host.

The system's wall clock may be stepped while a run trains. So spans are timed by the monotonic clock, to which one
offset is added, taken when this module is imported. On one host all processes read the same monotonic clock: once rank
0 has shared its offset, spans of different ranks are aligned exactly. Ranks on other hosts keep their own offset and
are aligned as well as the hosts' wall clocks are.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "shardscope/clock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_offset = time.time() - time.perf_counter()


def now() -> float:
    """Return the time in Unix seconds; it never goes back."""
    return _offset + time.perf_counter()


def align(store: Store, rank: int) -> None:
    """Use the clock of rank 0 on all ranks of its host. Every rank of the group calls this once."""
    global _offset  # noqa: PLW0603 - a process has one clock
    if rank == 0:
        store.set(_KEY, json.dumps([_host(), _offset]))
        return
    host, offset = json.loads(store.get(_KEY))
    if host == _host():
        _offset = offset


def _host() -> str:
    """An identifier of this host since it was booted: within it all processes read the same monotonic clock."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()
