"""The live tab: four plots of the ticked runs, and the timeline of the run in focus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from shardscope.measure.compare_runs.view import DIVERGED
from shardscope_widgets.figures import _ghosts, _overview, _timeline, theme
from shardscope_widgets.figures._curves import SMOOTHING, Curve, LossView
from shardscope_widgets.figures._ghosts import Ghost
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, words_html
from shardscope_widgets.kit.swatch import chip, swatch
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import safe

SPANS = (0, 5, SMOOTHING, 25, 100)
"""Offered spans of the exponential moving average, in steps; 0 draws only the unsmoothed values."""
_EMPTY = "No run is shown yet. Start a run, or tick one in the list."


class LiveView:
    """Two figures and their texts; this class draws the data it receives and makes no decisions."""

    def __init__(self) -> None:
        self.legend = widgets.HTML()
        self.overview = LiveFigure(_overview.empty(go.Figure()).update_layout(showlegend=False))
        self.overview_words = widgets.HTML()
        self.log = widgets.Checkbox(description="Log scale", value=False, indent=False)
        self.smoothing = widgets.Dropdown(
            description="Smoothing", options=[(_smoothing(span), span) for span in SPANS], value=SMOOTHING
        )
        self._drawn: tuple[Sequence[Trace], str, Ghost | None] = ((), "", None)
        self.focus = widgets.Dropdown(description="Timeline of", options=[("no run", "")], value="")
        self.follow = widgets.Checkbox(description="Follow", value=True, indent=False)
        self.window = widgets.Dropdown(description="Steps", options=[1, 2, 3, 5, 10], value=2)
        self.last_step = widgets.IntSlider(
            description="Last step", min=0, max=0, value=0, continuous_update=True
        )
        self.timeline_legend = widgets.HTML()
        self.timeline = LiveFigure(_timeline.empty(go.Figure()).update_layout(showlegend=False, margin_t=22))
        self.words = widgets.HTML()
        self.is_offering = False
        self.box = self._boxes()

    def _boxes(self) -> widgets.VBox:
        self.focus.tooltip = "Selected run: its timeline and recorded step are shown, and Stop stops it"
        self.follow.tooltip = "Always show the newest steps"
        self.window.tooltip = "How many steps the timeline shows"
        self.last_step.tooltip = "The last step that the timeline shows"
        self.log.tooltip = "Logarithmic axis for the loss"
        self.smoothing.tooltip = "Span of the exponential moving average that the bold loss curve shows"
        for control in (self.log, self.smoothing):
            control.observe(lambda _change: self.draw_overview(*self._drawn), "value")
        loss_bar = classed(widgets.HBox([self.log, self.smoothing]), "ss-bar", "ss-loss-bar")
        bar = classed(widgets.HBox([self.focus, self.window, self.last_step, self.follow]), "ss-bar")
        return widgets.VBox(
            [
                self.legend,
                loss_bar,
                self.overview,
                self.overview_words,
                bar,
                self.timeline_legend,
                self.timeline,
                self.words,
            ]
        )

    def draw_overview(self, traces: Sequence[Trace], focus: str = "", ghost: Ghost | None = None) -> None:
        """Draw the four plots with the legend above them.

        Args:
            traces: The runs.
            focus: Id of the run in focus.
            ghost: Predicted values of the run in focus; None draws no prediction.
        """
        self._drawn = (traces, focus, ghost)
        view = LossView(self.smoothing.value, self.log.value)
        info = _overview.overview_info(traces, view=view)
        places = _overview.run_properties(info)
        lines = [line for place in places for line in place] or _overview.NOTHING
        more: list[dict[str, Any]] = []
        predicted = next((trace for trace in traces if trace.run_id == focus and ghost is not None), None)
        if predicted is not None and ghost is not None:
            bars = info.memory.runs[list(traces).index(predicted)] if info.memory.is_held else None
            more = _ghosts.overview_ghosts(predicted, ghost, bars)
        self.overview.put(lines, _overview.overview_layout(info), more)
        keys = [_run_key(curve) for curve in info.loss.curves]
        if more and predicted is not None:
            dashed = RunStyle(theme.GREY, dash="dash")
            keys.append(f"<span>{swatch(dashed)}predicted for {safe(predicted.label)}</span>")
        self.legend.value = f'<div class="ss-legend">{"".join(keys) or _EMPTY}</div>'
        gap = "" if predicted is None or ghost is None else _ghosts.overview_gap(predicted, ghost)
        self.overview_words.value = words_html(f"{info.memory.text} {gap}".strip())

    def draw_timeline(self, trace: Trace | None, ghost: Ghost | None = None) -> None:
        """Draw the timeline of a run for the selected window of steps; None clears it.

        Args:
            trace: The run.
            ghost: Predicted values of the run; None draws no prediction.
        """
        if trace is None:
            self.timeline.put([], {"xaxis": _timeline.BLANK, "yaxis": _timeline.BLANK})
            self.timeline_legend.value = self.words.value = ""
            return
        known = trace.complete_span_steps()
        self._offer(known)
        last = None if self.follow.value else self.last_step.value
        info = _timeline.timeline_info(trace, last_step=last, num_steps=self.window.value)
        bars = _timeline.timeline_bars(info)[: _timeline.MOST_KINDS]
        layout = _timeline.timeline_layout(info)
        more: list[dict[str, Any]] = []
        if ghost is not None and ghost.parts and info.steps:
            more, layout = _ghosts.timeline_ghosts(info, ghost), _ghosts.with_ghost_row(info, layout, ghost)
        self.timeline.put(bars, layout | {"height": layout["height"] - 40}, more)
        self.timeline_legend.value = f'<div class="ss-legend">{"".join(map(_key, bars))}</div>'
        gap = "" if ghost is None else _ghosts.timeline_gap(trace, info, ghost)
        is_tied = trace.schedule and any(bar.name == "ring_all_reduce" for bar in info.bars)
        tied = _TIED if is_tied else ""
        few = _timeline.gap_text(info, known, self.window.value)
        self.words.value = words_html(f"{_timeline.timeline_text(info)} {few}{_LANES} {tied}{gap}")

    def _offer(self, known: Sequence[int]) -> None:
        """Extend the slider to all recorded steps and, if “Follow” is ticked, move it to the newest step."""
        if not known:
            return
        self.is_offering = True  # until it is False again, changes of the slider are not user input
        try:
            self.last_step.min, self.last_step.max = min(known[0], self.last_step.max), known[-1]
            self.last_step.min = known[0]
            if self.follow.value:
                self.last_step.value = known[-1]
        finally:
            self.is_offering = False

    def offer_runs(self, labels: Mapping[str, str], chosen: str) -> None:
        """Fill the list of runs that the timeline can show.

        Args:
            labels: Names of the runs by id.
            chosen: Id of the run to select.
        """
        options = [(label, run_id) for run_id, label in labels.items()] or [("no run", "")]
        self.is_offering = True  # selecting the first of new options is not user input
        try:
            if tuple(options) != tuple(self.focus.options):
                self.focus.options = options
            if chosen in labels and self.focus.value != chosen:
                self.focus.value = chosen
        finally:
            self.is_offering = False


def _run_key(curve: Curve) -> str:
    mark = f"&nbsp;<b>{DIVERGED} diverged</b>" if curve.diverged_at is not None else ""
    return f"<span>{swatch(curve.look)}{safe(curve.label)}{mark}</span>"


def _key(bar: Mapping[str, Any]) -> str:
    look = theme.RunStyle(bar["marker"]["color"], pattern=bar["marker"]["pattern"]["shape"])
    about = _timeline.SPANS.get(bar["name"], "")
    return f'<span title="{safe(about)}">{chip(look)}{safe(bar["name"])}</span>'


def _smoothing(span: int) -> str:
    return f"exponential, {span} steps" if span else "none"


_LANES = (
    "In each row, computation is above and communication below; grey is idle time. Drag to zoom, double-click to "
    "reset."
)
_TIED = (
    "In the ring all-reduce, the first and the last stage sum the gradient of a parameter that both hold, such as the "
    "token embedding; the stage that is ready first waits for the other. "
)
