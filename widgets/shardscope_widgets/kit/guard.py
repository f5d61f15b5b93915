"""Error handling: errors in callbacks are shown in the lab instead of being lost in a log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardscope.errors import ShardscopeError
from shardscope_widgets.words import safe


class Guard:
    """Runs callbacks one at a time and passes every error to `say` as HTML.

    Callbacks come from the kernel's main thread, from subshells and from the lab's own threads, so one lock serves
    all of them.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.lock = threading.RLock()
        self._say = say

    def callback(self, act: Callable[[], object], *, lock: bool = True) -> Callable[..., None]:
        """Return `act` as a callback whose errors are shown; arguments of the caller are ignored."""

        def guarded(*_ignored: object) -> None:
            with self.run(lock=lock):
                act()

        return guarded

    @contextmanager
    def run(self, *, lock: bool = True) -> Iterator[None]:
        """Show errors of the block; hold the lock for code that changes the lab, but not for code that waits."""
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
    """An error box around HTML that is already safe."""
    return f'<div class="ss-problem" role="alert">{inner}</div>' if inner else ""
