"""Drawing of all trials and of the chosen trial's run, with caches so that unchanged data is not read again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ipywidgets as widgets

from shardscope.spec import Job, Link
from shardscope.tuning.objectives import QUALITIES
from shardscope.tuning.records import NOT_BEGUN, TrialRecord
from shardscope.tuning.session import StudySession
from shardscope_widgets.figures._front import front_info
from shardscope_widgets.figures._trial_curves import trial_curves_info
from shardscope_widgets.figures._trials import TrialInfo, objective_text
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab.live import LiveView
from shardscope_widgets.training_lab.panels import Panels
from shardscope_widgets.tuning_lab import _words
from shardscope_widgets.tuning_lab._chosen import Watched
from shardscope_widgets.tuning_lab._fit import ImportancesFit
from shardscope_widgets.tuning_lab._relink import PENDING, Relinker, notes_of
from shardscope_widgets.tuning_lab._screen import TABS, TuningScreen
from shardscope_widgets.tuning_lab._study import Shown

PREDICT_WITHIN_S = 0.06
"""Time per redraw for predicting trials on another link, in seconds; remaining trials follow at later ticks."""


class PictureChoices(NamedTuple):
    """The user's choices of what to display."""

    x: str
    y: str
    colour: str
    chosen: int
    link: Link | None
    objectives: tuple[str, ...]


class Pictures:
    """Draws trials, with caches of expensive data: predictions, newest importances, and watched run."""

    def __init__(self, screen: TuningScreen, guard: Guard) -> None:
        self._screen, self._guard = screen, guard
        self._view: RunView | None = None
        self._watched: Watched | None = None
        self._is_opened, self._is_unseen = False, True
        self._told: tuple[str, Link | None] | None = None
        self.forget()

    def forget(self) -> None:
        """Clear all caches when another study is shown."""
        self._relinker: Relinker | None = None
        self._fit = ImportancesFit()
        self._on_link: list[TrialInfo] = []
        self._link: Link | None = None
        self.leave_run()
        self._screen.forget()

    # All trials.

    def draw(self, session: StudySession | None, trials: Sequence[TrialInfo], look: PictureChoices) -> None:
        """Draw the front, the learning curves, the table and the selected tab."""
        screen = self._screen
        chosen = look.chosen if look.chosen >= 0 else None
        self._link, self._on_link = look.link, self._relinked(session, trials, look)
        label = look.link.label if look.link else ""
        shown = self._on_link
        info = front_info(shown, x=look.x, y=look.y, colour=look.colour, chosen=chosen, link=label)
        screen.draw_front(info, label, notes_of(shown))
        quality = look.y if look.y in QUALITIES else QUALITIES[0]
        screen.draw_curves(trial_curves_info(shown, quality=quality, chosen=chosen))
        screen.draw_table(shown, look.objectives, look.chosen)
        self._draw_page(session, shown, look)
        self._draw_chosen(shown, look)

    def _relinked(
        self, session: StudySession | None, trials: Sequence[TrialInfo], look: PictureChoices
    ) -> list[TrialInfo]:
        if look.link is None or session is None:
            return list(trials)
        if self._relinker is None:
            self._relinker = Relinker(session.job)
        return self._relinker.onto(trials, look.objectives, look.link, budget_s=PREDICT_WITHIN_S)

    def _draw_page(
        self, session: StudySession | None, trials: Sequence[TrialInfo], look: PictureChoices
    ) -> None:
        page = self._screen.tabs.selected_index
        if session is None:
            return
        if page == TABS.index("Slices"):
            self._screen.draw_slices(trials, session.definition.space, look.y, look.chosen)
        elif page == TABS.index("Parallel coordinates"):
            self._screen.draw_parallel(trials, session.definition.space, look.y, look.chosen)
        elif page == TABS.index("Importances"):
            self._fit.want(session, trials, look.y)
            self._screen.draw_importances(self._fit.info)

    def has_more(self) -> bool:
        """Return whether a visible part was incomplete when it was drawn, so that it must be drawn again."""
        pending = any(trial.note == PENDING for trial in self._on_link)
        return pending or self._screen.tabs.selected_index == TABS.index("Importances")

    # The chosen trial.

    def _draw_chosen(self, trials: Sequence[TrialInfo], look: PictureChoices) -> None:
        panel = self._screen.chosen
        trial = next((trial for trial in trials if trial.number == look.chosen), None)
        panel.box.layout.display = "none" if trial is None else None
        if trial is not None:
            panel.head.value = _words.chosen_html(trial, look.objectives)

    def draw_run(self, shown: Shown | None, number: int, *, can_prune: bool) -> None:
        """Draw the run of the chosen trial so far."""
        record = shown.records.get(number) if shown is not None else None
        if shown is None or record is None:
            return
        panel = self._screen.chosen
        has_run = record.run is not None and Path(record.run).is_dir()
        if has_run:
            self._watch(tuple(path for path in record.pieces if Path(path).is_dir()))
        panel.say_what_can_be_done(
            run=has_run, prune=can_prune, finished=record.state not in NOT_BEGUN, pinned=record.pinned
        )
        changed = self._watched is not None and self._watched.poll()
        if changed or self._is_unseen:
            self._is_unseen = False
            panel.draw_run(self._watched)
        if changed or (record.state, self._link) != self._told:
            self._told = (record.state, self._link)
            self._draw_figures(shown.session.job(number), record)
        if self._watched is not None and self._view is not None and (changed or self._is_opened):
            self._is_opened = False
            if self._screen.run_box.children:
                self._view.draw(self._watched.trace)

    def _watch(self, pieces: tuple[str, ...]) -> None:
        """Follow the runs of a trial, from where the last read ended; a promoted trial continues in another run."""
        if self._watched is None or not self._watched.continue_with(pieces):
            self._watched, self._is_unseen = Watched(pieces), True

    def _draw_figures(self, job: Job, record: TrialRecord) -> None:
        told = next((trial for trial in self._on_link if trial.number == record.number), None)
        projected = ""
        if self._link is not None and told is not None and "seconds" in told.values:
            projected = objective_text("seconds", told.values["seconds"] / told.steps)
        formula = self._watched.uncompressed_bytes() if self._watched is not None else None
        figures = _words.figures_html(job, record.measured, formula, projected)
        self._screen.chosen.figures.value = figures + _words.alarms_html(record.measured)

    def open_run(self) -> None:
        """Show the run of the chosen trial as in the Training Lab, from the next redraw on."""
        if self._view is None:
            self._view = RunView(self._guard)
        self._screen.run_box.children = (self._view.box,)
        self._is_opened = True

    def leave_run(self) -> None:
        """Remove the run from the display, because another trial was chosen."""
        self._watched, self._told, self._is_unseen = None, None, True
        self._is_opened = False
        self._screen.run_box.children = ()
        self._screen.chosen.show_code(None)
        self._screen.chosen.figures.value = ""


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
