"""The thread that runs a study's trials, so that the kernel stays responsive; one per study and kernel."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from weakref import WeakSet

from shardscope.tuning.measured import TrialMetrics
from shardscope.tuning.noise_probe import NotMeasured
from shardscope.tuning.session import StudySession
from shardscope_widgets.kit.threads import panel_thread

TICK_S = 0.05
_PATIENCE_S = 3.0
_STARTED: WeakSet[Engine] = WeakSet()
_KNOWN: dict[tuple[str, str, str], Engine] = {}


def engine_of(root: object, storage: object, name: str) -> Engine:
    """Return the engine of a study; labs in the same kernel share it, so a re-run cell finds it still running."""
    return _KNOWN.setdefault((str(root), str(storage), name), Engine())


class Engine:
    """Background thread that calls the driver repeatedly until all trials are done or it is stopped.

    Attributes:
        session: Session that is running or ran last; None before the first session.
        error: Exception that ended the thread; None if it ended normally.
        before: Sentence on what the thread does before the first trial; empty if there is nothing to report.
    """

    def __init__(self) -> None:
        self.session: StudySession | None = None
        self.error: Exception | None = None
        self.before = ""
        self._stopping = threading.Event()
        self._asked: SimpleQueue[Callable[[StudySession], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether trials are running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested and has not finished."""
        return self.is_running and self._stopping.is_set()

    def live(self) -> dict[int, TrialMetrics]:
        """Return the current metrics of the trials running in this kernel, by trial number."""
        if self.session is None or not self.is_running:
            return {}
        return {number: live.measured for number, live in list(self.session.driver.live.items())}

    def can_prune(self, number: int) -> bool:
        """Return whether this kernel can stop a trial: it is running here, or paused at a rung."""
        return self.session is not None and self.is_running and self.session.driver.can_prune(number)

    def start(self, opened: Callable[[threading.Event], StudySession]) -> None:
        """Start the thread, which opens a session and runs it; return at once.

        Args:
            opened: Function that returns the session. It receives an event that is set when a stop is requested.
        """
        if self.is_running:
            return
        self._stopping.clear()
        self.error, self.before = None, ""
        self._asked = SimpleQueue()
        _STARTED.add(self)
        self._thread = panel_thread(self._work, opened, name="tune")
        self._thread.start()

    def stop(self) -> None:
        """Ask the runs to stop, and return at once (see `wait`). The next `start` first reruns interrupted trials."""
        self._stopping.set()
        if self.session is not None and self.is_running:
            self.session.driver.retry.given_up.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds; return whether the thread has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return not self.is_running

    def ask(self, act: Callable[[StudySession], None]) -> None:
        """Queue an action, which the thread runs between two ticks."""
        self._asked.put(act)

    def _work(self, opened: Callable[[threading.Event], StudySession]) -> None:
        try:
            self.session = session = opened(self._stopping)
            try:
                while not self._stopping.is_set() and self._tick(session):
                    self._stopping.wait(TICK_S)
            finally:
                session.driver.stop()
        except NotMeasured:  # stopped before the study existed
            return
        except Exception as error:  # noqa: BLE001 - the lab shows any error of the thread
            self.error = error

    def _tick(self, session: StudySession) -> bool:
        try:
            while True:
                self._asked.get_nowait()(session)
        except Empty:
            return session.driver.tick()


def _stop_all() -> None:
    """Stop all runs when the kernel exits; their trials are marked for a retry."""
    running = [engine for engine in _STARTED if engine.is_running]
    for engine in running:
        engine.stop()
    for engine in running:
        engine.wait(_PATIENCE_S)


atexit.register(_stop_all)
