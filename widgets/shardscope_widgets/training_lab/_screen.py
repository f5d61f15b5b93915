"""The Training Lab's widgets and their layout; this module draws the data it receives and makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope_widgets.fault_lab import Breaker, FaultsView, Resumer
from shardscope_widgets.figures.theme import RunStyle, run_looks
from shardscope_widgets.job_form import controls
from shardscope_widgets.job_form.axes import Axes
from shardscope_widgets.job_form.choices import KINDS, JobChoices
from shardscope_widgets.job_form.options import Options
from shardscope_widgets.job_form.topics import FIRST
from shardscope_widgets.kit.frame import Frame
from shardscope_widgets.kit.markup import classed, columns, note_html, status_html
from shardscope_widgets.kit.mesh_panel import MeshPanel
from shardscope_widgets.step_player import StepPlayer
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab import _words
from shardscope_widgets.training_lab._advice import AdvicePanel
from shardscope_widgets.training_lab._forecast import Forecast
from shardscope_widgets.training_lab._ghosts import Ghosts
from shardscope_widgets.training_lab._history import History
from shardscope_widgets.training_lab._outcome import OutcomePanel
from shardscope_widgets.training_lab._payoff import PayoffPanel
from shardscope_widgets.training_lab._place import Place
from shardscope_widgets.training_lab._presets import Preset, PresetBar
from shardscope_widgets.training_lab._runbook import RunEntry
from shardscope_widgets.training_lab._table import RunsTable
from shardscope_widgets.training_lab.live import LiveView
from shardscope_widgets.training_lab.panels import Panels

if TYPE_CHECKING:
    from shardscope.runlog.step_events import StepEvents

ABOUT = (
    "trains on real ranks in separate processes; runs continue if you close the tab, and stop with the kernel"
)
_STEP, _LIVE, _MESH = 0, 1, 2
"""Tabs of the step player, which shows the predicted step until there is a run, of the curves, and of the mesh."""


class Screen:
    """All widgets of a lab.

    Args:
        choices: Traits with which the controls are synchronised.
        check_box: Widget that shows the progress and result of a check.
        advice: The explanation of the run in focus.
        ghosts: Predicted values of the runs.
        table: The table that compares the shown runs.
        breaker: Buttons that inject faults into the run in focus, or resume it.
        resumer: Button that resumes the run in focus, below its status.
        place: Where the job runs.
        on_preset: Called with a preset whose chip was pressed.
        on_found: Called when the predicted step of the form's job has changed.
    """

    def __init__(
        self,
        choices: JobChoices,
        *,
        check_box: widgets.Widget,
        advice: AdvicePanel,
        ghosts: Ghosts,
        table: RunsTable,
        breaker: Breaker,
        resumer: Resumer,
        place: Place,
        on_preset: Callable[[Preset], None],
        on_found: Callable[[], None],
    ) -> None:
        self.controls = controls.make_controls(choices)
        self.options = {kind: Options(choices, kind) for kind in KINDS}
        self.axes = Axes(choices, self.options["strategy"])
        self.start = widgets.Button(description="Start", icon="play", button_style="primary")
        self.stop = widgets.Button(description="Stop", icon="stop", disabled=True)
        self.check = widgets.Button(description="Check", icon="check")
        self.start.tooltip = "Start this job on real ranks"
        self.stop.tooltip = "Stop the selected run at its next step"
        self.frame = Frame(title="Training Lab", about=ABOUT)
        self.plan, self.status, self.problem = (widgets.HTML() for _ in range(3))
        self.table = table
        self.forecast, self.outcome, self.payoff = Forecast(on_found), OutcomePanel(), PayoffPanel()
        self.advice, self.ghosts = advice, ghosts
        self.presets, self.place = PresetBar(on_preset), place
        self.topics = controls.Topics(choices, self.controls, self.options, place.box, lambda: place.title)
        self.history, self.live, self.panels, self.player = History(), LiveView(), Panels(), StepPlayer()
        self.mesh = MeshPanel()
        self.breaker, self.faults = breaker, FaultsView()
        self.resumer = resumer
        self._offered: tuple[str, str] | None = None
        self.follow = widgets.Checkbox(description="Ranks follow the form", value=False, indent=False)
        self.follow.tooltip = "When the form changes during a run, stop the run and start the changed job"
        step_bar = classed(widgets.HBox([self.follow, breaker.buttons["kill"]]), "ss-bar")
        self.of_ranks = widgets.VBox([step_bar, breaker.said])
        tabs = {
            "One step": widgets.VBox([self.of_ranks, self.player]),
            "Live": widgets.VBox([self.live.box, self.panels.box]), "Mesh": self.mesh.box, "Side by side": table.box,
            "Predicted": self.outcome.box, "Compression": self.payoff.box,
            "Faults": widgets.VBox([breaker.box, self.faults.box, breaker.resize_box]),
        }  # fmt: skip
        self.tabs = widgets.Tab(list(tabs.values()), titles=tuple(tabs), selected_index=_STEP)
        self.looks: dict[str, RunStyle] = {}
        """Line styles of the shown runs, by run id."""
        self.say_checking(is_checking=False)
        self.children = self._arrange(check_box)

    def _arrange(self, check_box: widgets.Widget) -> tuple[widgets.Widget, ...]:
        first = [self.controls[name] for name in FIRST]
        buttons = classed(widgets.HBox([self.start, self.stop, self.check]), "ss-buttons")
        bar = classed(widgets.HBox([*first, buttons, self.axes, self.status]), "ss-first", "ss-controls")
        said = classed(widgets.VBox([self.plan, self.forecast.box]), "ss-said")
        left = widgets.VBox([said, self.topics, self.history])
        right = widgets.VBox(
            [
                self.resumer.box,
                self.payoff.said,
                self.advice.box,
                self.problem,
                check_box,
                self.tabs,
            ]
        )
        return self.frame, self.presets, bar, columns(left, right)

    def show_step(self) -> None:
        """Open the tab of the step player."""
        self.tabs.selected_index = _STEP

    def show_live(self) -> None:
        """Switch from the tab of the step player to that of the curves; leave any other open tab."""
        if self.tabs.selected_index == _STEP:
            self.tabs.selected_index = _LIVE

    def show_mesh(self) -> None:
        """Open the tab of the mesh."""
        self.tabs.selected_index = _MESH

    def say_plan(self, text: str, *, is_possible: bool) -> None:
        """Show what the Start button would do, or why the job is invalid."""
        self.start.disabled = not is_possible
        self.plan.value = note_html(text, is_bad=not is_possible)

    def say_checking(self, *, is_checking: bool) -> None:
        """Label the check button “Check”, or “Cancel” while a check is running."""
        self.check.description, self.check.icon = ("Cancel", "times") if is_checking else ("Check", "check")
        self.check.tooltip = (
            "Cancel the running check"
            if is_checking
            else "Train this job with its strategy and on one process, and compare every loss and parameter"
        )

    def draw_runs(
        self, entries: Mapping[str, RunEntry], shown: Sequence[RunEntry], focus: str, note: str = ""
    ) -> None:
        """Draw the list of runs with a note below it, the legend and the four plots."""
        traces = [entry.trace for entry in shown]
        looks = run_looks(traces)
        self.looks = by_id = {entry.run.id: look for entry, look in zip(shown, looks, strict=True)}
        self.history.shown = list(by_id)
        self.history.update(entries, by_id, note)
        self.live.offer_runs({entry.run.id: entry.trace.label for entry in shown}, focus)
        self.live.draw_overview(traces, focus, self.ghosts.found.get(focus))

    def draw_status(self, entry: RunEntry | None, text: str, state: str) -> None:
        """Draw the status line of the run in focus."""
        self.status.value = status_html(text, state)
        self.stop.disabled = entry is None or not entry.is_alive
        offered = None if entry is None else (entry.run.id, entry.state)
        if offered != self._offered:
            self._offered = offered
            self.resumer.show(None if entry is None else entry.run)

    def draw_details(self, focus: Trace | None, shown: Sequence[Trace]) -> None:
        """Draw the timeline, and the panels below it."""
        known = self.ghosts.found
        self.live.draw_timeline(focus, known.get(focus.run_id) if focus is not None else None)
        last_step = None if self.live.follow.value else self.live.last_step.value
        self.panels.draw(focus, shown, last_step=last_step, ghosts=known)

    def draw_step(self, predicted: StepEvents | None, measured: StepEvents | None, note: str) -> None:
        """Play a predicted step with the measured step below it; a step that is already playing is not restarted."""
        first, second = (measured, None) if predicted is None else (predicted, measured)
        if first is not self.player.step_events or (second is None and self.player.measured):
            self.player.show(first, measured=second)
        elif second is not None and not self.player.measured:
            self.player.add(second)
        self.player.note = note

    def draw_faults(self, entry: RunEntry | None) -> None:
        """Draw what failed in the run in focus, and offer to inject faults or to resume the run."""
        self.of_ranks.layout.display = "none" if entry is None else None
        self.faults.draw(None if entry is None else entry.trace)
        self.breaker.show(None if entry is None else entry.run, None if entry is None else entry.trace)

    def draw_summary(self, shown: Sequence[RunEntry]) -> None:
        """Draw the table that compares the runs."""
        self.table.draw(shown)

    def failure_of(self, entry: RunEntry) -> str:
        """Return why a run failed, as HTML; empty if it did not fail."""
        error = entry.run.error
        return "" if error is None else _words.failure_html(entry, error)
