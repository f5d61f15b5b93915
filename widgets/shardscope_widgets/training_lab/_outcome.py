"""What came of a run: the run in focus beside its prediction, compared in a thread of its own once it has ended."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import ipywidgets as widgets
import plotly.graph_objects as go

from shardscope.errors import ShardscopeError
from shardscope_widgets import figures
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.words import safe

if TYPE_CHECKING:
    from shardscope.measure.compare.comparison import Comparison
    from shardscope.runtime import Run

_LATER = "The run in focus is compared with its prediction once it has ended."
_WORKING = "The run is being compared with its prediction."
_NOTHING = (
    "This run cannot be compared: its job cannot be predicted here, as for a model, data or loss of your own."
)


class Outcome:
    """A table and a figure of a run beside its prediction; a sentence in their place while there is none."""

    def __init__(self) -> None:
        self.table = widgets.HTML()
        self.figure = LiveFigure(go.Figure(), label="Predicted and measured")
        self.figure.layout.display = "none"
        self.box = widgets.VBox([self.table, self.figure])
        self.found: Comparison | None = None
        self._asked: Run | None = None
        self._thread: threading.Thread | None = None
        self._say(_LATER)

    def want(self, run: Run | None) -> None:
        """Compare `run`, which has ended, or clear the last comparison with None; returns at once."""
        if (run and run.id) == (self._asked and self._asked.id):
            return
        self._asked, self.found = run, None
        self._say(_LATER if run is None else _WORKING)
        if run is not None and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._work, name="shardscope-outcome", daemon=True)
            self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the newest comparison."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _work(self) -> None:
        done: Run | None = None
        while (run := self._asked) is not None and run is not done:
            done, found = run, compared(run)
            if run is self._asked:
                self._show(found)

    def _show(self, found: Comparison | str) -> None:
        if isinstance(found, str):
            self._say(found)
            return
        self.found = found
        self.table.value = f'<div class="ss-outcome">{found._repr_html_()}</div>'
        self.figure.show(figures.compared(found))
        self.figure.layout.display = None

    def _say(self, text: str) -> None:
        self.table.value = f'<div class="ss-words">{safe(text)}</div>'
        self.figure.layout.display = "none"


def compared(run: Run) -> Comparison | str:
    """Return the comparison of a run with its prediction, or the reason why there is none.

    The job is traced by the process that launches runs, as before it starts.
    """
    from shardscope.measure.compare.of_run import compare
    from shardscope.runtime.preflight import preflight

    prediction = preflight(run.job, timed=False).prediction
    if prediction is None:
        return _NOTHING
    try:
        return compare(run, prediction=prediction)
    except ShardscopeError as error:
        return str(error)
