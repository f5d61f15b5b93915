"""Display and layout of the Tuning Lab. It draws the data it receives; the lab decides what to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from shardscope.spec.space import Space
from shardscope_widgets.figures import _front, _importances, _parallel, _slices, _trial_curves, theme
from shardscope_widgets.figures._trials import TrialInfo
from shardscope_widgets.kit.click_figure import ClickFigure
from shardscope_widgets.kit.drawer import drawer
from shardscope_widgets.kit.frame import Frame
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, heading, note_html, status_html, words_html
from shardscope_widgets.tuning_lab import _words
from shardscope_widgets.tuning_lab._chosen import ChosenPanel
from shardscope_widgets.tuning_lab._parts import SpacePicker, TrialTable
from shardscope_widgets.tuning_lab._table import table_info

ABOUT = "search for the best settings of a job; every trial is a real run"
TABS = ("Trials", "Importances", "Slices", "Parallel coordinates")


class TuningScreen:
    """All widgets of a lab, arranged around its controls."""

    def __init__(  # noqa: PLR0917
        self,
        job: Mapping[str, widgets.Widget],
        options: widgets.Widget,
        study: Mapping[str, widgets.Widget],
        link: Mapping[str, widgets.Widget],
        axes: Mapping[str, widgets.Widget],
        objectives: SpacePicker,
        baselines: widgets.Widget,
    ) -> None:
        self.space, self.baselines = SpacePicker(), baselines
        self.start = widgets.Button(description="Start", icon="play", button_style="primary")
        self.stop = widgets.Button(description="Stop", icon="stop", disabled=True)
        self.start.tooltip = "Run trials until the study is complete"
        self.stop.tooltip = "Stop the running trials; they are rerun first when the study continues"
        self.plan, self.status, self.problem, self.front_words, self.link_words, self.impossible, self.fit_words, \
            self.slice_words, self.parallel_words = (widgets.HTML() for _ in range(9))  # fmt: skip
        self.frame = Frame(title="Tuning Lab", about=ABOUT)
        self.front, self.slices, self.parallel, self.curves = (
            ClickFigure(theme.blank(), label=label)
            for label in ("All trials", "Objective by setting", "Parallel coordinates", "Learning curves")
        )
        self.parallel.add_class("ss-together")
        self.importances = LiveFigure(theme.blank(), label="Importances")
        self.table, self.chosen = TrialTable(), ChosenPanel()
        self.run_box = widgets.VBox()
        self.tabs = self._tabs()
        self._drawn: dict[str, Any] = {}
        self._study = 0
        self.forget()
        self.settings, drawer_ = drawer("Settings", self._groups(job, options, study, objectives))
        self.children = (
            self.frame, self._actions(), self.problem, self.plan, drawer_,
            *self._results(link, axes), self.tabs, self.chosen.box, self.run_box,
        )  # fmt: skip

    def _groups(
        self,
        job: Mapping[str, widgets.Widget],
        options: widgets.Widget,
        study: Mapping[str, widgets.Widget],
        objectives: SpacePicker,
    ) -> widgets.GridBox:
        """Return the inputs of the drawer, with one column per topic."""
        groups = (
            [heading("Job"), _grid(job), options], [heading("Search", "with real runs"), self.space, self.baselines],
            [heading("Study"), _grid(study), objectives],
        )  # fmt: skip
        return classed(widgets.GridBox([widgets.VBox(group) for group in groups]), "ss-groups")

    def _actions(self) -> widgets.HBox:
        """Return the buttons and the status, which stay in view while the results scroll."""
        buttons = classed(widgets.HBox([self.start, self.stop]), "ss-buttons")
        return classed(widgets.HBox([buttons, self.status]), "ss-actions")

    def _results(
        self, link: Mapping[str, widgets.Widget], axes: Mapping[str, widgets.Widget]
    ) -> tuple[widgets.Widget, ...]:
        self.front.add_class("ss-grow")
        self.curves.add_class("ss-side")
        bar = classed(widgets.HBox(list(axes.values())), "ss-bar")
        plots = classed(widgets.HBox([self.front, self.curves]), "ss-plots")
        linkbar = classed(widgets.HBox(list(link.values())), "ss-linkbar")
        return bar, plots, self.front_words, linkbar, self.link_words

    def _tabs(self) -> widgets.Tab:
        pages = (
            [self.table, self.impossible], [self.fit_words, self.importances], [self.slice_words, self.slices],
            [self.parallel_words, self.parallel],
        )  # fmt: skip
        return widgets.Tab([widgets.VBox(page) for page in pages], titles=TABS)

    def say_plan(self, text: str, *, is_possible: bool) -> None:
        """Show next to the settings what the Start button would do, or why it is disabled."""
        self.settings.summary = text if is_possible else ""
        self.plan.value = "" if is_possible else note_html(text, is_bad=True)

    def say_status(self, text: str, state: str, share: float | None) -> None:
        """Show the status line at the top, and a progress bar of the share of trials that have ended, unless it is
        None.
        """
        label = "Share of the trials that have ended"
        bar = (
            ""
            if share is None
            else f'<progress value="{min(1.0, share):.3f}" aria-label="{label}"></progress>'
        )
        self.status.value = status_html(text, state) + bar

    def draw_front(self, info: _front.FrontInfo, link: str, notes: Mapping[str, Sequence[int]]) -> None:
        """Draw the front, and the text on the effect of the link sliders."""
        self.link_words.value = words_html(_words.link_text(link, notes))
        if self._is_new("front", info):
            self._show(self.front, _front.front_spec(info))
            self.front_words.value = words_html(_front.front_text(info))

    def draw_curves(self, info: _trial_curves.TrialCurvesInfo) -> None:
        """Draw the learning curves of the trials."""
        if self._is_new("curves", info):
            self._show(self.curves, _trial_curves.trial_curves_spec(info))

    def draw_table(self, trials: Sequence[TrialInfo], objectives: Sequence[str], chosen: int) -> None:
        """Draw the table of trials, and the text about impossible trials."""
        info = table_info(trials, objectives)
        if self._is_new("table", (info, chosen)):
            with self.table.hold_sync():
                self.table.header, self.table.texts = list(info.header), list(info.texts)
                self.table.rows, self.table.chosen = list(info.rows), chosen
            self.impossible.value = words_html(_words.impossible_text(trials))

    def draw_slices(self, trials: Sequence[TrialInfo], space: Space, objective: str, chosen: int) -> None:
        """Draw the objective against each setting."""
        info = _slices.slices_info(trials, space, objective=objective, chosen=chosen)
        if self._is_new("slices", info):
            self._show(self.slices, _slices.slices_spec(info))
            self.slice_words.value = words_html(_slices.slices_text(info))

    def draw_parallel(self, trials: Sequence[TrialInfo], space: Space, objective: str, chosen: int) -> None:
        """Draw all settings as parallel coordinates."""
        info = _parallel.parallel_info(trials, space, objective=objective, chosen=chosen)
        if self._is_new("parallel", info):
            self._show(self.parallel, _parallel.parallel_spec(info))
            self.parallel_words.value = words_html(_parallel.parallel_text(info))

    def draw_importances(self, info: _importances.ImportancesInfo | None) -> None:
        """Draw the importances of settings; `info` is None during the first fit."""
        if info is None:
            self.fit_words.value = words_html("Fitting the importances …")
        elif self._is_new("importances", info):
            self._show(self.importances, _importances.importances_spec(info))
            self.fit_words.value = words_html(_importances.importances_text(info))
            self.importances.layout.display = None if info.names else "none"

    def forget(self) -> None:
        """Clear the parts that show finished trials, and make the next calls redraw everything, for another study."""
        self._drawn = {}
        self._study += 1
        for words in (self.slice_words, self.fit_words, self.parallel_words):
            words.value = words_html("No trial is complete yet.")
        for figure in (self.slices, self.parallel, self.importances):
            figure.show(theme.blank())

    def _show(self, figure: LiveFigure, spec: dict[str, Any]) -> None:
        """Show a figure of this study, without the zoom that the user chose for another study."""
        figure.figure = spec | {"layout": spec["layout"] | {"uirevision": self._study}}

    def _is_new(self, name: str, info: Any) -> bool:
        if self._drawn.get(name) == info:
            return False
        self._drawn[name] = info
        return True


def _grid(controls: Mapping[str, widgets.Widget]) -> widgets.GridBox:
    return classed(widgets.GridBox(list(controls.values())), "ss-controls")
