"""Error handling: errors in callbacks are shown in the lab instead of disappearing in a log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardscope.errors import ShardscopeError
from shardscope_widgets.words import safe


class Guard:
    """Runs callbacks one at a time and passes every error to `say` as HTML.

    Callbacks may run on the kernel's main thread, in subshells and on the lab's own threads. One lock serialises them.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.lock = threading.RLock()
        self._say = say

    def callback(self, act: Callable[[], object], *, lock: bool = True) -> Callable[..., None]:
        """Return a callback that calls `act` without arguments and shows its errors.

        Args:
            act: The action; arguments that the caller passes to the callback are ignored.
            lock: Whether to hold the lock while `act` runs.
        """

        def guarded(*_ignored: object) -> None:
            with self.run(lock=lock):
                act()

        return guarded

    @contextmanager
    def run(self, *, lock: bool = True) -> Iterator[None]:
        """Show any error in the ``with`` block.

        Args:
            lock: Whether to hold the lock: required for code that changes the lab, forbidden for code that waits.
        """
        try:
            if lock:
                with self.lock:
                    yield
            else:
                yield
        except ShardscopeError as error:
            self._say(problem_html(safe(error)))
        except Exception as error:  # noqa: BLE001 - shown in the panel
            self._say(problem_html(f"{safe(type(error).__name__)}: {safe(error)}"))


def problem_html(inner: str) -> str:
    """Return an error box around `inner`, which must already be safe HTML; empty if `inner` is empty."""
    return f'<div class="ss-problem" role="alert">{inner}</div>' if inner else ""
