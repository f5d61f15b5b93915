"""The thread that runs a study's trials, so that the kernel stays free; one a study and kernel, whoever looks at it."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from weakref import WeakSet

from shardscope.tuning.measured import Measured
from shardscope.tuning.noise_probe import NotMeasured
from shardscope.tuning.session import Session

TICK_S = 0.05
_PATIENCE_S = 3.0
_STARTED: WeakSet[Engine] = WeakSet()
_KNOWN: dict[tuple[str, str, str], Engine] = {}


def engine_of(root: object, storage: object, name: str) -> Engine:
    """The engine of a study: the same for every lab of this kernel, so that a cell that runs anew finds it at work."""
    return _KNOWN.setdefault((str(root), str(storage), name), Engine())


class Engine:
    """Calls the driver again and again until all trials are done, or somebody stops it.

    Attributes:
        session: That it runs, or ran last; None before.
        error: What ended it, if it did not end by itself.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.error: Exception | None = None
        self._stopping = threading.Event()
        self._asked: SimpleQueue[Callable[[Session], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether trials are being run."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked it to stop and it has not yet."""
        return self.is_running and self._stopping.is_set()

    def live(self) -> dict[int, Measured]:
        """What the trials that run here have come to by now."""
        if self.session is None or not self.is_running:
            return {}
        return {number: live.measured for number, live in list(self.session.driver.live.items())}

    def can_prune(self, number: int) -> bool:
        """Whether a trial is this kernel's to stop: it runs here, or waits at a rung."""
        return self.session is not None and self.is_running and self.session.driver.can_prune(number)

    def start(self, opened: Callable[[threading.Event], Session]) -> None:
        """Run the session that `opened` gives, in the thread; returns at once.

        What it is called with is set once somebody asks to stop.
        """
        if self.is_running:
            return
        self._stopping.clear()
        self.error = None
        self._asked = SimpleQueue()
        self._thread = threading.Thread(
            target=self._work, args=(opened,), name="shardscope-tune", daemon=True
        )
        _STARTED.add(self)
        self._thread.start()

    def stop(self) -> None:
        """Stop the runs; returns at once, `wait` waits. What was running is run again, first, by `start`."""
        self._stopping.set()
        if self.session is not None and self.is_running:
            self.session.driver.patience.given_up.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended within a number of seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return not self.is_running

    def ask(self, act: Callable[[Session], None]) -> None:
        """Have something done between two looks at the runs."""
        self._asked.put(act)

    def _work(self, opened: Callable[[threading.Event], Session]) -> None:
        try:
            self.session = session = opened(self._stopping)
            try:
                while not self._stopping.is_set() and self._tick(session):
                    self._stopping.wait(TICK_S)
            finally:
                session.driver.stop()
        except NotMeasured:  # asked to stop before there was a study
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the lab shows it: a thread has nobody else to tell
            self.error = error

    def _tick(self, session: Session) -> bool:
        try:
            while True:
                self._asked.get_nowait()(session)
        except Empty:
            return session.driver.tick()


def _stop_all() -> None:
    """The kernel ends: no run stays behind, and their trials are set aside to be run again."""
    running = [engine for engine in _STARTED if engine.is_running]
    for engine in running:
        engine.stop()
    for engine in running:
        engine.wait(_PATIENCE_S)


atexit.register(_stop_all)
