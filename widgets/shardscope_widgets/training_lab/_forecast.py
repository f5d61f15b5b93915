"""The prediction for the job that the controls describe, computed in its own thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope_widgets.words import safe

if TYPE_CHECKING:
    from shardscope.runtime.preflight import Preflight
    from shardscope.spec import Job

PAUSE_S = 0.2
"""Seconds to wait after the last change of a control before predicting."""


class Forecast:
    """A line with the prediction for the newest job, which expands to show all terms.

    If the job will not fit in memory, a checkbox allows the user to start it anyway. Nothing is predicted before
    `begin` is called, because until then the lab is not displayed.
    """

    def __init__(self) -> None:
        self.line = widgets.HTML()
        self.anyway = widgets.Checkbox(description="Start it anyway", indent=False)
        self.anyway.layout.display = "none"
        self.box = widgets.VBox([self.line, self.anyway])
        self.box.add_class("ss-forecast")
        self.found: Preflight | None = None
        self._asked: Job | None = None
        self._begun = False
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start predicting; call this when the lab is displayed."""
        self._begun = True
        self.want(self._asked)

    def want(self, job: Job | None) -> None:
        """Request a prediction for `job` and return at once; None clears the last prediction."""
        if self._begun and job == self._asked and (job is None or self.found is not None):
            return
        self._asked, self.found = job, None
        self.anyway.value = False
        self._changed.set()
        if job is None:
            self.line.value, self.anyway.layout.display = "", "none"
        elif self._begun and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._work, name="shardscope-forecast", daemon=True)
            self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds for the prediction of the newest job; None waits without limit."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _work(self) -> None:
        from shardscope.runtime.preflight import preflight

        while (job := self._asked) is not None and self.found is None:
            self._changed.clear()
            if job is not self._asked or self._changed.wait(PAUSE_S):
                continue
            found = preflight(job)
            if job is self._asked:
                self._show(found)

    def _show(self, found: Preflight) -> None:
        self.found = found
        refused = found.refusal is not None
        text = f"It does not fit: {found.refusal}" if refused else str(found)
        inside = "" if found.prediction is None else found.prediction._repr_html_()
        opened = f"<details><summary>{safe(text)}</summary>{inside}</details>" if inside else safe(text)
        self.line.value = f'<div class="ss-note{" bad" if refused else ""}">{opened}</div>'
        self.anyway.layout.display = None if refused else "none"
