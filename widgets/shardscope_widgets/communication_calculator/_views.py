"""The calculator's tabs: three figures, and a diagram of which worker sends to which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from shardscope.analytic.communication import ALGORITHMS
from shardscope.measure.compression.curve import Worth
from shardscope_widgets.figures import _communication as info
from shardscope_widgets.figures import _communication_look as look
from shardscope_widgets.figures import _communication_plots as plots
from shardscope_widgets.figures import _compression_speedup as speedup
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._communication import CommunicationQuestion
from shardscope_widgets.figures._who_sends import has_picture, picture, round_text, who_sends_svg
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, words_html
from shardscope_widgets.words import safe

Drawing = tuple[list[dict[str, Any]], dict[str, Any], str]


def _draw_curves(shown: info.CostCurvesInfo) -> Drawing:
    return plots.curve_traces(shown), plots.curve_layout(shown), plots.curves_text(shown)


def _draw_efficiency(question: CommunicationQuestion) -> Drawing:
    shown = info.efficiency_info(question)
    return (
        plots.efficiency_traces(shown),
        plots.efficiency_layout(shown),
        plots.efficiency_text(shown),
    )


def _draw_speedup(worth: Worth | str) -> Drawing:
    if isinstance(worth, str):
        return [], theme.empty(worth), ""
    shown = speedup.compression_speedup_info(worth, slides=False)
    how = "Assumes that workers compute, compress at memory bandwidth and then run a ring all-reduce, without overlap."
    if worth.of:
        how = f"{worth.of}: compression times were measured on this machine."
    return (
        speedup.speedup_traces(shown),
        speedup.speedup_layout(shown),
        " ".join([*worth.sentences[1:], how]),  # the status says the first
    )


class FigureView(widgets.VBox):  # type: ignore[misc]
    """A figure with a text description below it."""

    def __init__(self, label: str, draw: Callable[[CommunicationQuestion], Drawing]) -> None:
        self._draw = draw
        self.figure = LiveFigure(look.template().update_layout(showlegend=False, margin_t=30), label=label)
        self.words = widgets.HTML()
        super().__init__([self.figure, self.words])

    def show(self, question: CommunicationQuestion) -> None:
        """Draw the figure and its description for `question`."""
        traces, layout, words = self._draw(question)
        self.figure.show_parts(traces, layout)
        self.words.value = words_html(words, is_live=True)


class WhoSends(widgets.VBox):  # type: ignore[misc]
    """The rounds of one algorithm, to step through or play as an animation."""

    def __init__(self) -> None:
        self.algorithm = widgets.Dropdown(description="Algorithm", options=[("ring", "ring")], value="ring")
        self.round = widgets.IntSlider(description="Round", min=1, max=1, value=1)
        self.play = widgets.Play(interval=900, min=1, max=1, value=1, show_repeat=False)
        self.drawing, self.words, self.about = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.round.tooltip = "Round to draw"
        widgets.jslink((self.play, "value"), (self.round, "value"))
        bar = classed(widgets.HBox([self.algorithm, self.play, self.round]), "ss-bar")
        telling = classed(widgets.VBox([self.words, self.about]), "ss-telling")
        super().__init__([bar, classed(widgets.HBox([self.drawing, telling]), "ss-picture")])
        self.algorithm.observe(self._take_algorithm, "value")
        self.round.observe(self._draw, "value")
        self._op = "all_reduce"

    def show(self, question: CommunicationQuestion) -> None:
        """List the algorithms of `question` that have a picture, and draw the selected algorithm."""
        self._op = question.op
        options = [(ALGORITHMS[name].title, name) for name in question.algorithms if has_picture(name)]
        if not options:
            self.drawing.value = self.about.value = ""
            self.words.value = words_html("Tick an algorithm to see who sends to whom.")
            return
        if tuple(options) != self.algorithm.options:
            kept = self.algorithm.value
            self.algorithm.options = options
            names = [name for _, name in options]
            self.algorithm.value = kept if kept in names else names[0]
        self._take_algorithm()

    def _take_algorithm(self, _change: object = None) -> None:
        if self.algorithm.value is None:
            return
        rounds = len(picture(self.algorithm.value).rounds)
        for control in (self.play, self.round):
            control.max = rounds
        self.round.value = min(self.round.value, rounds)
        self._draw()

    def _draw(self, _change: object = None) -> None:
        name = self.algorithm.value
        shown, number = picture(name), self.round.value - 1
        self.drawing.value = who_sends_svg(shown, number, look.LOOKS[name].colour)
        self.words.value = words_html(round_text(shown, number), is_live=True)
        algorithm = ALGORITHMS[name]
        op = self._op if self._op in algorithm.formulas else next(iter(algorithm.formulas))
        self.about.value = (
            f"<p>{safe(algorithm.about)}</p>"
            f'<span class="ss-formula">{safe(algorithm.formulas[op])}</span>'
            f'<div class="ss-about">{op.replace("_", "-")}, since {algorithm.since}. {safe(algorithm.source)}. '
            "The drawing always shows eight workers.</div>"
        )


def make_views(
    worth_of: Callable[[CommunicationQuestion], Worth | str],
) -> dict[str, widgets.DOMWidget]:
    """Return the tabs, by title.

    Args:
        worth_of: Returns the steps with and without compression, or why there are none.
    """
    return {
        "Message size": FigureView(
            "Time and traffic by message size", lambda question: _draw_curves(info.by_size_info(question))
        ),
        "Workers": FigureView(
            "Time and traffic by number of workers",
            lambda question: _draw_curves(info.by_workers_info(question)),
        ),
        "Efficiency": FigureView("Scaling efficiency", _draw_efficiency),
        "Compression": FigureView(
            "Step time with and without compression", lambda question: _draw_speedup(worth_of(question))
        ),
        "Who sends to whom": WhoSends(),
    }
