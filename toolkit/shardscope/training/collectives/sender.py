"""The thread that sends for a rank while computation continues: one task after another, and none after a failure."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Sender:
    """Runs the tasks that are submitted to it, in order.

    After a task has failed, or was refused before it started, nothing more is sent. The peers are still in the
    collective that failed and would mistake the next one's messages for its own, and gloo aborts a process that
    receives a message of another size. All later tasks fail with the same exception, which states the cause.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.failure: Exception | None = None
        """The exception that ended the sending."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, send: Callable[[], T]) -> Future[T]:
        """Run `send` after all tasks submitted before."""
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
        """End the thread."""
        self._thread.shutdown()
