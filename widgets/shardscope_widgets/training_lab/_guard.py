"""Errors in place: what goes wrong in a callback is shown in the lab instead of vanishing in a log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardscope.errors import ShardscopeError
from shardscope_widgets.training_lab._words import problem_html
from shardscope_widgets.words import safe


class Guard:
    """Runs what may fail, one thing at a time, and hands every error to `say` as HTML.

    Callbacks come from the kernel's main thread, from subshells and from the lab's own threads: one lock for all.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.lock = threading.RLock()
        self._say = say

    def callback(self, act: Callable[[], object], *, lock: bool = True) -> Callable[..., None]:
        """`act` as a callback whose errors show; whatever the caller passes is not needed."""

        def guarded(*_ignored: object) -> None:
            with self.run(lock=lock):
                act()

        return guarded

    @contextmanager
    def run(self, *, lock: bool = True) -> Iterator[None]:
        """Inside, errors are shown; `lock` is for what touches the lab, and not for what waits."""
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
