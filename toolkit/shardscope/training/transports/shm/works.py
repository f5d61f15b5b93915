"""Handles of collectives through shared memory, and the thread that runs the asynchronous ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardscope.training.transports.protocol import timed_out


class CollectiveWork(dist.Work):
    """A collective that has finished, is running, or is waiting for its turn.

    Args:
        run: Function that carries out the collective.
        result: The tensors that the work's future holds.
        devices: The devices of these tensors, if they are not in CPU memory.
    """

    def __init__(
        self, run: Callable[[], None], result: Any, devices: list[int | str | torch.device] | None = None
    ) -> None:
        super().__init__()
        self._run, self._result, self._devices = run, result, devices
        self._error: Exception | None = None
        self._is_over = threading.Event()
        self._settled: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def carry_out(self) -> None:
        """Run the collective, and keep its error for `wait`."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - raised in `wait`
            self._error = error
        with self._lock:
            self._is_over.set()
            settled = self._settled
        if settled is not None:
            settled.set_result(None)

    def _outcome(self, _: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective has finished.

        Raises:
            DistBackendError: A rank is gone, or the wait timed out.
        """
        if not self._is_over.wait(timeout.total_seconds() if timeout else None):
            assert timeout is not None
            raise dist.DistBackendError(
                f"{timed_out(timeout.total_seconds())}, while this rank was waiting for a collective"
            )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def is_success(self) -> bool:
        return self._is_over.is_set() and self._error is None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that holds the result, or an error that C++ code recognises.

        `Future.set_exception` only stores the exception as a result, for Python to raise. `DistributedDataParallel`,
        which waits in C++, would take it for tensors, and crash.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            self._settled = torch.futures.Future(devices=self._devices)
            self._future = self._settled.then(self._outcome)
            is_over = self._is_over.is_set()
        if is_over:
            self._settled.set_result(None)
        return self._future


class CollectiveThread:
    """Runs the collectives of a group one after the other, in the order in which they are called.

    A synchronous collective runs on the thread that calls it, unless earlier ones are still running. A callback of a
    future runs on the thread of the collectives, and may call a collective and wait for it, as PyTorch's PowerSGD hook
    does; the thread then runs that collective, and those before it, within the callback.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[CollectiveWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: CollectiveWork | None = None

    def submit(self, work: CollectiveWork, *, is_async: bool) -> CollectiveWork:
        """Run a collective in its turn; a synchronous one has finished on return."""
        if not is_async and (self._last is None or self._last.is_completed()):
            work.carry_out()
            return work
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="collectives", daemon=True)
            self._thread.start()
        self._last = work
        self._queue.put(work)
        if threading.current_thread() is self._thread:
            self._run_until(work)
        return work

    def _serve(self) -> None:
        self._run_until(None)

    def _run_until(self, last: CollectiveWork | None) -> None:
        """Run collectives in their order, up to and including `last`; with None, until the group is closed."""
        while (work := self._queue.get()) is not None:
            work.carry_out()
            if work is last:
                return
        self._queue.put(None)  # for the caller of this function, if that is a callback

    def close(self) -> None:
        """Stop the thread when it has run all collectives."""
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
