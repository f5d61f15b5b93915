"""SIGTERM as Ctrl-C, so that a command which is told to end takes its ranks along."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a run the way Ctrl-C does."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated` in the main thread."""

    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
