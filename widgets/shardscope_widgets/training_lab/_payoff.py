"""Whether compression paid off in the run in focus, in words and as the curve, in a separate thread after its end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope.errors import ShardscopeError
from shardscope_widgets.figures import compression_speedup, theme
from shardscope_widgets.kit import markup
from shardscope_widgets.kit.background import Background
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.words import safe

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from shardscope.measure.compression.curve import Worth
    from shardscope.runtime import Run

_LATER = "The curve of step time against bandwidth is drawn once a selected run with compression has ended."
_WORKING = "Compression is being timed on this machine, to find out whether it paid off."
_UNKNOWN = "Whether compression paid off is not known"
_TIMED = (
    "The time of compression was measured on this machine; other predictions of the job estimate it, so their step may "
    "differ slightly."
)
_OWN_FUNCTIONS = (
    "the job has functions of your own, which a lab does not call; ss.compression_speedup(run.job) calls them"
)


class PayoffPanel(Background):
    """A sentence on whether compression paid off, and the curve of step time against bandwidth.

    Nothing is measured before `begin` is called, because the lab is not displayed before that.

    Attributes:
        said: The sentence, to be shown next to the status of the ended run.
        box: The curve, with its sentences.
        found: The curve's data; None before they are known.
    """

    def __init__(self) -> None:
        self.said = widgets.HTML()
        self.figure = LiveFigure(theme.blank(), label="Does compression pay off?")
        self.words = widgets.HTML()
        self.box = widgets.VBox([self.figure, self.words])
        self.found: Worth | None = None
        self._asked: Run | None = None
        self._begun = False
        self._working = threading.Lock()
        self._showing = threading.Lock()
        self._show(None, "", None)

    def begin(self) -> None:
        """Start measuring; call this when the lab is displayed."""
        self._begun = True

    def want(self, run: Run | None, runs: Sequence[Run] = (), *, is_idle: bool = True) -> None:
        """Start to compute the answer for `run`, which must have ended, and return at once; None clears the
        last answer.

        Args:
            run: The run.
            runs: Runs that the curve marks if they are of the same job.
            is_idle: Whether no run is in progress, because a run would slow down the compression that is timed here.
        """
        if run is not None and not run.job.compression.is_on:
            run = None
        if (run and run.id) == (self._asked and self._asked.id):
            return
        if not (self._begun and is_idle):
            run = None  # it is wanted again when the lab is redrawn
        with self._showing:
            self._asked = run
            self._show(None, "" if run is None else _WORKING, None)
        if run is not None:
            self._start(self._work, run, list(runs), name="payoff")

    def _work(self, run: Run, runs: list[Run]) -> None:
        with self._working:  # one at a time; a run that is no longer in focus by then is skipped
            if run is not self._asked:
                return
            try:
                found, text = _answer(run, runs)
                figure = None if found is None else compression_speedup(found)
            except ShardscopeError as error:
                found, text, figure = None, f"{_UNKNOWN}: {error}", None
            except Exception as error:  # noqa: BLE001 - nobody sees an error of a thread
                found, text, figure = None, f"{_UNKNOWN}: {type(error).__name__}: {error}", None
            with self._showing:  # the focus may have changed since
                if run is self._asked:
                    self._show(found, text, figure)

    def _show(self, found: Worth | None, text: str, figure: go.Figure | None) -> None:
        self.found = found
        head, colon, rest = text.partition(":")
        bold = f"<b>{safe(head + colon)}</b>{safe(rest)}"
        self.said.value = f'<div class="ss-words" role="status">{bold}</div>' if text else ""
        self.said.layout.display = None if text else "none"
        self.figure.layout.display = "none" if figure is None else None
        if figure is not None:
            self.figure.show(figure)
        words = text or _LATER if found is None else " ".join([*found.sentences, _TIMED])
        self.words.value = markup.words_html(words)


def _answer(run: Run, runs: list[Run]) -> tuple[Worth | None, str]:
    """Return the curve, and whether compression paid off; no curve if the job has user-defined functions."""
    from shardscope.measure.compression.after_run import paid_off_text
    from shardscope.measure.compression.speedup import compression_speedup as predict

    if run.job.user_functions:
        return None, f"{_UNKNOWN}: {_OWN_FUNCTIONS}"
    found = predict(run.job, run.cluster, runs=runs)
    return found, paid_off_text(run, found, runs)
