"""The live tab: four plots of the ticked runs, and the timeline of the run in focus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from shardscope_widgets.figures import _overview, _timeline, theme
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.swatch import chip, swatch
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import safe

_EMPTY = "Nothing to show yet. Start a run, or tick one in the list."


class LiveView:
    """Two figures and their texts; this class draws the data it receives and makes no decisions."""

    def __init__(self) -> None:
        self.legend = widgets.HTML()
        self.overview = LiveFigure(_overview.empty(go.Figure()).update_layout(showlegend=False))
        self.focus = widgets.Dropdown(description="Timeline of", options=[("no run", "")], value="")
        self.follow = widgets.Checkbox(description="Follow", value=True, indent=False)
        self.window = widgets.Dropdown(description="Steps", options=[1, 2, 3, 5, 10], value=2)
        self.last_step = widgets.IntSlider(description="up to", min=0, max=0, value=0, continuous_update=True)
        self.timeline_legend = widgets.HTML()
        self.timeline = LiveFigure(_timeline.empty(go.Figure()).update_layout(showlegend=False, margin_t=22))
        self.words = widgets.HTML()
        self.is_offering = False
        self.box = self._boxes()

    def _boxes(self) -> widgets.VBox:
        self.focus.tooltip = "Run in focus: its timeline and ring are shown, and Stop stops it"
        self.follow.tooltip = "Always show the newest steps"
        self.window.tooltip = "How many steps the timeline shows"
        self.last_step.tooltip = "The last step that the timeline shows"
        bar = widgets.HBox([self.focus, self.window, self.last_step, self.follow])
        bar.add_class("ss-bar")
        return widgets.VBox(
            [self.legend, self.overview, bar, self.timeline_legend, self.timeline, self.words]
        )

    def draw_overview(self, traces: Sequence[Trace], looks: Sequence[RunStyle]) -> None:
        """Draw the four plots with the legend above them."""
        info = _overview.overview_info(traces)
        places = _overview.run_properties(info)
        lines = [line for place in places for line in place] or _overview.NOTHING
        self.overview.put(lines, _overview.overview_layout(info))
        keys = [
            f"<span>{swatch(k)}{safe(trace.label)}</span>" for k, trace in zip(looks, traces, strict=False)
        ]
        self.legend.value = f'<div class="ss-legend">{"".join(keys) or _EMPTY}</div>'

    def draw_timeline(self, trace: Trace | None) -> None:
        """Draw the timeline of a run for the selected window of steps; None clears it."""
        if trace is None:
            self.timeline.put([], {"xaxis": _timeline.BLANK, "yaxis": _timeline.BLANK})
            return
        known = trace.complete_span_steps()
        self._offer(known)
        last = None if self.follow.value else self.last_step.value
        info = _timeline.timeline_info(trace, last_step=last, num_steps=self.window.value)
        bars = _timeline.timeline_bars(info)[: _timeline.MOST_KINDS]
        layout = _timeline.timeline_layout(info)
        self.timeline.put(bars, layout | {"height": layout["height"] - 40})
        self.timeline_legend.value = f'<div class="ss-legend">{"".join(map(_key, bars))}</div>'
        self.words.value = f'<div class="ss-words">{safe(_timeline.timeline_text(info))} {_LANES}</div>'

    def _offer(self, known: Sequence[int]) -> None:
        """Extend the slider to all recorded steps, and move it to the newest one while following."""
        if not known:
            return
        self.is_offering = True  # the slider now moves without user input
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
        if tuple(options) != tuple(self.focus.options):
            self.focus.options = options
        if chosen in labels and self.focus.value != chosen:
            self.focus.value = chosen


def _key(bar: Mapping[str, Any]) -> str:
    look = theme.RunStyle(bar["marker"]["color"], pattern=bar["marker"]["pattern"]["shape"])
    return f"<span>{chip(look)}{safe(bar['name'])}</span>"


_LANES = (
    "Each row has computing above and communication below; grey is idle. Drag to zoom, double-click to reset."
)
