"""Clock for time spans: a monotonic clock in Unix seconds, which is the same on all ranks of a host.

The system's wall clock may jump during a run. Spans are therefore timed by the monotonic clock plus an offset to Unix
time, which is measured once, when this module is imported. All processes on a host have the same monotonic clock, so
after rank 0 has shared its offset, spans from different ranks are aligned exactly. Ranks on other hosts keep their own
offset, so their spans are aligned only as well as the wall clocks of the hosts.
"""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING

from shardscope.machine import boot_id

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "shardscope/clock"
_offset = time.time() - time.perf_counter()


def now() -> float:
    """Return the current time in Unix seconds; it never decreases."""
    return _offset + time.perf_counter()


def align(store: Store, rank: int) -> None:
    """Share rank 0's clock offset with all ranks on its host. Every rank of the group must call this once."""
    global _offset  # noqa: PLW0603 - a process has one clock
    if rank == 0:
        store.set(_KEY, json.dumps([_host(), _offset]))
        return
    host, offset = json.loads(store.get(_KEY))
    if host == _host():
        _offset = offset


def _host() -> str:
    """Return an identifier of this host's current boot: processes with the same identifier share a monotonic clock."""
    return boot_id() or socket.gethostname()
