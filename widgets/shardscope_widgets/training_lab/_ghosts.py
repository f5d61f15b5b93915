"""Predicted values of the shown runs, computed once for each run in a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardscope.spec import Job
from shardscope_widgets.figures._ghosts import Ghost, ghost_of

if TYPE_CHECKING:
    from shardscope.runtime import Run


class Ghosts:
    """`found` has the predicted values of each run that could be predicted, by run id.

    Nothing is predicted before `begin` is called, because the lab is not displayed before that.

    Args:
        on_change: Called when a prediction has been added.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.found: dict[str, Ghost] = {}
        self._tried: set[str] = set()
        self._on_change = on_change
        self._begun = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start predicting; call this when the lab is displayed."""
        self._begun = True

    def want(self, runs: Sequence[Run]) -> None:
        """Request the predictions of these runs and return at once."""
        new = [run for run in runs if run.id not in self._tried]
        is_busy = self._thread is not None and self._thread.is_alive()
        if new and self._begun and not is_busy:
            self._thread = threading.Thread(
                target=self._work, args=(new,), name="shardscope-ghosts", daemon=True
            )
            self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds for the predictions that are being computed; None waits without limit."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _work(self, runs: Sequence[Run]) -> None:
        from shardscope.runtime.preflight import preflight

        for run in runs:
            self._tried.add(run.id)
            prediction = preflight(run.job, run.cluster).prediction if type(run.job) is Job else None
            if prediction is not None:
                self.found[run.id] = ghost_of(prediction)
                self._on_change()
