"""Handle SIGTERM like Ctrl-C, so that a terminated command also stops its ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM; it stops a run in the same way as Ctrl-C."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise `Terminated` in the main thread if SIGTERM arrives within this context."""

    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
