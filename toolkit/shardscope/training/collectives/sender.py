"""The thread that sends a rank's messages while computation continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Sender:
    """Runs tasks on one thread, in the order in which they are submitted.

    After a task has failed, all later tasks fail with the same exception and send nothing. The other ranks are still in
    the failed collective, and would mistake messages of a later collective for messages of the failed one; gloo aborts
    a process that receives a message of unexpected size.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.failure: Exception | None = None
        """The exception of the first task that failed; None if none has failed."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, send: Callable[[], T]) -> Future[T]:
        """Run `send` after all tasks submitted earlier, and return a future for its result."""
        return self._thread.submit(self._carry_out, send)

    def _carry_out(self, send: Callable[[], T]) -> T:
        if self.failure is not None:
            raise self.failure
        try:
            return send()
        except Exception as error:
            self.failure = error
            raise

    def close(self) -> None:
        """Stop the thread when all submitted tasks are done."""
        self._thread.shutdown()
