"""The clock of a lab: a daemon thread that calls a method of the lab a few times a second, while the lab exists."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from shardscope_widgets.kit.threads import panel_thread

INTERVAL_S = 0.2
"""Time between polls, in seconds. Five polls a second stay far below Jupyter's limit of 1,000 messages a second."""


class Clock:
    """Calls the bound method `beat` at a fixed interval until the object of the method is garbage-collected.

    Calls never overlap: a slow call delays the next one instead of queueing it, so the newest state is always drawn.
    """

    def __init__(self, beat: Callable[[], None], *, interval_s: float = INTERVAL_S) -> None:
        self._beat = weakref.WeakMethod(beat)
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, unless it is already running."""
        if not self.is_running:
            self._stopping.clear()
            self._thread = panel_thread(self._loop, name="lab")
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait up to 2 seconds for it to end, unless called from the thread itself."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _loop(self) -> None:
        while not self._stopping.wait(self._interval_s):
            beat = self._beat()
            if beat is None:
                return
            beat()
            del beat
