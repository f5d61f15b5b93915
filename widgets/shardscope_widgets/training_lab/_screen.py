"""The Training Lab's widgets and their layout; this module draws the data it receives and makes no decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ipywidgets as widgets

from shardscope_widgets.figures.theme import RunStyle, run_looks
from shardscope_widgets.html import summary_html
from shardscope_widgets.job_form import controls
from shardscope_widgets.job_form.choices import KINDS, JobChoices
from shardscope_widgets.job_form.options import Options
from shardscope_widgets.kit.frame import Frame
from shardscope_widgets.ring_view import RingView
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab import _words
from shardscope_widgets.training_lab._forecast import Forecast
from shardscope_widgets.training_lab._history import History
from shardscope_widgets.training_lab._outcome import OutcomePanel
from shardscope_widgets.training_lab._runbook import RunEntry
from shardscope_widgets.training_lab.live import LiveView
from shardscope_widgets.training_lab.panels import Panels
from shardscope_widgets.words import safe

ABOUT = "real ranks in separate processes, which continue training if you close the tab"


class Screen:
    """All widgets of a lab.

    Args:
        choices: Traits that the controls are synchronised with.
        check_box: Widget that shows the check.
    """

    def __init__(self, choices: JobChoices, check_box: widgets.Widget) -> None:
        self.controls = controls.make_controls(choices)
        self.options = {field: Options(choices, field) for field in KINDS}
        self.start = widgets.Button(description="Start", icon="play", button_style="primary")
        self.stop = widgets.Button(description="Stop", icon="stop", disabled=True)
        self.check = widgets.Button(description="Check", icon="check")
        self.start.tooltip = "Start this job on real ranks"
        self.stop.tooltip = "Stop the run in focus at its next step"
        self.plan, self.status, self.problem, self.summary = (widgets.HTML() for _ in range(4))
        self.forecast, self.outcome = Forecast(), OutcomePanel()
        self.history, self.live, self.panels, self.ring = History(), LiveView(), Panels(), RingView()
        self.tabs = widgets.Tab(
            [widgets.VBox([self.live.box, self.panels.box]), self.summary, self.outcome.box, self.ring],
            titles=("Live", "Side by side", "Predicted", "Ring"),
        )
        self.say_checking(is_checking=False)
        self.children = self._arrange(check_box)

    def _arrange(self, check_box: widgets.Widget) -> tuple[widgets.Widget, ...]:
        buttons = widgets.HBox([self.start, self.stop, self.check])
        panel = controls.panel(self.controls, self.options)
        left = widgets.VBox([panel, buttons, self.plan, self.forecast.box, self.history])
        right = widgets.VBox([self.status, self.problem, check_box, self.tabs])
        main = widgets.HBox([left, right])
        for box, name in ((buttons, "ss-buttons"), (left, "ss-left"), (right, "ss-right"), (main, "ss-main")):
            box.add_class(name)
        return Frame(title="Training Lab", about=ABOUT), main

    def say_plan(self, text: str, *, is_possible: bool) -> None:
        """Show what the Start button would do, or why the job is invalid."""
        self.start.disabled = not is_possible
        self.plan.value = f'<div class="ss-note{"" if is_possible else " bad"}">{safe(text)}</div>'

    def say_checking(self, *, is_checking: bool) -> None:
        """Label the check button for starting a check, or for cancelling the running one."""
        self.check.description, self.check.icon = ("Cancel", "times") if is_checking else ("Check", "check")
        self.check.tooltip = (
            "Cancel the running check"
            if is_checking
            else "Run this job sharded and on one process, and compare every loss and parameter"
        )

    def draw_runs(
        self, entries: Mapping[str, RunEntry], shown: Sequence[RunEntry], focus: str, note: str = ""
    ) -> None:
        """Draw the list of runs with a note below it, the legend and the four plots."""
        traces = [entry.trace for entry in shown]
        looks = run_looks([trace.strategy for trace in traces])
        by_id: dict[str, RunStyle] = {entry.run.id: look for entry, look in zip(shown, looks, strict=True)}
        self.history.shown = list(by_id)
        self.history.update(entries, by_id, note)
        self.live.offer_runs({entry.run.id: entry.trace.label for entry in shown}, focus)
        self.live.draw_overview(traces, looks)

    def draw_status(self, entry: RunEntry | None, text: str) -> None:
        """Draw the status line of the run in focus."""
        state = entry.state if entry else "idle"
        self.status.value = f'<div class="ss-status {safe(state)}" role="status">{safe(text)}</div>'
        self.stop.disabled = entry is None or not entry.is_alive

    def draw_details(self, focus: Trace | None, shown: Sequence[Trace]) -> None:
        """Draw the timeline, the panels below it, and the ring animation."""
        self.live.draw_timeline(focus)
        last_step = None if self.live.follow.value else self.live.last_step.value
        self.panels.draw(focus, shown, last_step=last_step)
        if focus is not None and focus.chunks:
            self.ring.show(focus)

    def draw_summary(self, shown: Sequence[Trace]) -> None:
        """Draw the table that compares the runs."""
        self.summary.value = summary_html(shown)

    def failure_of(self, entry: RunEntry) -> str:
        """Return why a run failed, as HTML; empty if it did not fail."""
        error = entry.run.error
        return "" if error is None else _words.failure_html(entry, error)
