"""Background threads for work that would otherwise block a panel or the cell that displays it."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from weakref import WeakSet

from shardscope_widgets.kit.threads import panel_thread

GRACE_S = 5.0
"""Seconds that the end of the process waits for work in progress."""
_begun: WeakSet[threading.Thread] = WeakSet()


class Background:
    """Base class for work in a daemon thread; `_start` returns at once, and `wait` waits for the newest work."""

    _thread: threading.Thread | None = None

    @property
    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, work: Callable[..., None], *arguments: object, name: str) -> None:
        self._thread = panel_thread(work, *arguments, name=name)
        _begun.add(self._thread)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds for the newest work to end; None waits without limit."""
        if self._thread is not None:
            self._thread.join(timeout)


@atexit.register
def _let_work_end() -> None:
    """Wait for work in progress, because a thread that the interpreter stops inside torch aborts the process."""
    for thread in list(_begun):
        thread.join(GRACE_S)
