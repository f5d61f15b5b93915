"""Emulates a slow source of data: reads take as long as a connection of limited bandwidth would need."""

from __future__ import annotations

import threading
import time

from shardscope.spec.link import Link


class Pace:
    """The emulated connection of one rank: concurrent reads share its bandwidth, while their latencies overlap.

    Args:
        link: Bandwidth and latency of the connection.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def wait(self, num_bytes: float, started: float) -> None:
        """Sleep until a read of `num_bytes`, which began at `started` (`time.monotonic`), would be complete.

        The time that the read really took is part of it. Returns early if the connection is closed.
        """
        with self._lock:
            self._free_at = max(self._free_at, started) + num_bytes / self._link.bandwidth
            until = self._free_at + self._link.latency_s
        self._closed.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End all waits, so that threads which read ahead can end."""
        self._closed.set()
