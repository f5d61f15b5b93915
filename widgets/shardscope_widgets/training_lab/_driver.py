"""The lab's clock: one daemon thread that calls a method a few times a second, for as long as its owner
lives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

INTERVAL_S = 0.2
"""Five looks a second: more than the eye needs, and far below the 1,000 messages a second that a server
takes.
"""


class Driver:
    """Calls `beat` again and again, never twice at once, and drops it when its owner is gone.

    A slow beat delays the next one instead of queueing it, so what is drawn is always the newest.
    """

    def __init__(self, beat: Callable[[], None], *, interval_s: float = INTERVAL_S) -> None:
        self._beat = weakref.WeakMethod(beat)
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if not self.is_running:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._loop, name="shardscope-lab", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; returns once it has, unless called from the thread itself."""
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
