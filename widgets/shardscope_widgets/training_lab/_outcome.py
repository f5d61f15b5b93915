"""Compare the run in focus with its prediction, in a separate thread, after the run has ended."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope.measure.compare.comparison import shown
from shardscope.measure.compare.of_run import comparison_or_reason
from shardscope_widgets import figures
from shardscope_widgets.figures import theme
from shardscope_widgets.kit.background import Background
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, words_html
from shardscope_widgets.kit.own_code import may_call

if TYPE_CHECKING:
    from shardscope.measure.compare.comparison import Comparison
    from shardscope.runtime import Run

_LATER = "Once the selected run has ended, it is compared with its prediction here."
_WORKING = "Comparing the run with its prediction …"
_FAILED = "The run cannot be compared with its prediction"


class OutcomePanel(Background):
    """The verdict on a prediction, bars of its terms, and the folded table; or a sentence while there is none.

    Nothing is compared before `begin` is called, because the lab is not displayed before that.
    """

    def __init__(self) -> None:
        self.words, self.table = widgets.HTML(), widgets.HTML()
        self.figure = LiveFigure(theme.blank(), label="Predicted and measured")
        self.box = widgets.VBox([self.words, self.figure, classed(self.table, "ss-outcome")])
        self.found: Comparison | None = None
        self._asked: Run | None = None
        self._calls = False
        self._begun = False
        self._working = threading.Lock()
        self._say(_LATER)

    def begin(self) -> None:
        """Start comparing; call this when the lab is displayed."""
        run, self._begun, self._asked = self._asked, True, None
        self.want(run)

    def want(self, run: Run | None) -> None:
        """Start comparing `run`, which must have ended, and return at once; None clears the last comparison."""
        calls = run is not None and may_call(run.job)
        if (run and run.id, calls) == (self._asked and self._asked.id, self._calls):
            return
        self._asked, self._calls, self.found = run, calls, None
        self._say(_LATER if run is None else _WORKING)
        if run is not None and self._begun:
            self._start(self._work, run, name="outcome")

    def _work(self, run: Run) -> None:
        with self._working:  # one at a time; a run that is no longer in focus by then is skipped
            if run is self._asked:
                try:
                    found = comparison_or_reason(run, job=run.job if self._calls else None)
                    if run is self._asked:
                        self._show(found)
                except Exception as error:  # noqa: BLE001 - nobody sees an error of a thread
                    if run is self._asked:
                        self._say(f"{_FAILED}: {type(error).__name__}: {error}")

    def _show(self, found: Comparison | str) -> None:
        if isinstance(found, str):
            self._say(found)
            return
        self.found = found
        head, table, notes = (part.html() for part in shown(found))
        self.words.value = head
        self.table.value = f"<details><summary>All {len(found.rows)} terms</summary>{table}</details>{notes}"
        self.figure.show(figures.compared(found))
        self.figure.layout.display = None

    def _say(self, text: str) -> None:
        self.words.value, self.table.value = words_html(text), ""
        self.figure.layout.display = "none"
