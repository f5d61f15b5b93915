"""View of a trial's run as in the Training Lab: curves, timeline, and the panels of its strategy."""

from __future__ import annotations

import ipywidgets as widgets

from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab.live import LiveView
from shardscope_widgets.training_lab.panels import Panels


class RunView:
    """View of one run; created only when a run is first opened, because its figures are large."""

    def __init__(self, guard: Guard) -> None:
        self.live, self.panels = LiveView(), Panels()
        self.live.focus.layout.display = "none"
        self.box = widgets.VBox([self.live.box, self.panels.box])
        self._trace: Trace | None = None
        for control in (self.live.window, self.live.follow, self.live.last_step):
            control.observe(guard.callback(self._redraw), "value")

    def draw(self, trace: Trace) -> None:
        """Draw the run `trace`."""
        self._trace = trace
        self.live.draw_overview([trace])
        self._redraw()

    def _redraw(self) -> None:
        if self._trace is None or self.live.is_offering:
            return
        last = None if self.live.follow.value else self.live.last_step.value
        self.live.draw_timeline(self._trace)
        self.panels.draw(self._trace, [self._trace], last_step=last)
