"""The thread that sends for a rank, so that computing goes on: one thing after another, and nothing after a failure."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Sender:
    """Carries out what is handed to it, in that order.

    Once something has failed, or was refused before it began, nothing more is sent: the peers are still in the
    collective that failed, would take the next one's messages for its own, and gloo aborts a process that gets a
    message of another size. All that comes later fails with the same exception, which is the one that tells why.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self.failure: Exception | None = None
        """What has ended the sending."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, send: Callable[[], T]) -> Future[T]:
        """Have it done after all that was submitted before."""
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
