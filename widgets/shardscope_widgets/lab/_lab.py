"""The Lab widget: tabs that are filled when they are first opened."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import traitlets as t

from shardscope.errors import ShardscopeError
from shardscope.spec import Job
from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.kit.markup import classed, words_html
from shardscope_widgets.kit.still import Still
from shardscope_widgets.lab._panels import (
    COMPARE,
    KEEPS_ITS_JOB,
    PLAN,
    PREDICT,
    RUN,
    SHOWS_A_RUN,
    TABS,
    Where,
    makers,
)
from shardscope_widgets.words import plural, safe

if TYPE_CHECKING:
    from shardscope.planner.rehearsal import Rehearsal
    from shardscope.runtime import Run


class Lab(Still, widgets.VBox):  # type: ignore[misc]
    """All panels as tabs of one job: plan, predict, run, compare, tune and break it.

    Each panel is created when its tab is first opened. The job is the one in the form of the Run tab. Predict always
    shows the prediction of this job; Compare and Break show the run in focus of the Run tab. Plan and Tune keep their
    own settings, and offer to load the job.

    Args:
        job: The initial job, whose prediction is shown, and no earlier run; None for the form's default job, with the
            newest runs.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        tab: The tab that is open.

    Example:
        >>> lab = Lab(ss.Job(model="gpt-nano", data="python-source"), tab="Predict")  # doctest: +SKIP
        >>> lab.panels["Run"].start()  # once Run has been opened  # doctest: +SKIP
    """

    tab = t.Enum(TABS, RUN, help="The tab that is open.")
    problem = t.Unicode("", help="The last error, as HTML; empty if there is none.")

    def __init__(self, job: Job | None = None, *, root: Path | str | None = None, tab: str = RUN) -> None:
        super().__init__(tab=tab)
        self._asked: tuple[Job, Where] = (JobChoices().job() if job is None else job, None)
        self._makers = makers(Path(root) if root is not None else None, is_given=job is not None)
        self._panels: dict[str, Any] = {}
        self._jobs: dict[str, tuple[Job, Where]] = {}
        self._is_shown = False
        self._guard = Guard(lambda problem: setattr(self, "problem", problem))
        self._title, self._problem, self._other = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._take = widgets.Button(
            description="Use this job", tooltip="Reopen this tab with the Run tab's job"
        )
        self._offer = classed(widgets.HBox([self._other, self._take]), "ss-bar")
        self._tabs = widgets.Tab([widgets.VBox() for _ in TABS], titles=TABS, selected_index=TABS.index(tab))
        self.children = (self._title, self._offer, self._problem, self._tabs)
        classed(self, "ss-lab")
        self._tabs.observe(lambda change: setattr(self, "tab", TABS[change["new"]]), "selected_index")
        self.observe(self._guard.callback(self._open), "tab")
        self.observe(lambda change: setattr(self._problem, "value", change["new"]), "problem")
        self._take.on_click(self._guard.callback(self.take))
        self._guard.callback(self._open)()

    @property
    def job(self) -> Job:
        """The job in the form of the Run tab; while the form is invalid, the last valid job."""
        return self._plan()[0]

    def _plan(self) -> tuple[Job, Where]:
        if RUN in self._panels:
            with suppress(ShardscopeError):
                self._asked = self._panels[RUN]._plan()  # noqa: SLF001 - a part of this panel
        return self._asked

    @property
    def panels(self) -> Mapping[str, Any]:
        """The panels that have been opened, by tab."""
        return MappingProxyType(self._panels)

    def take(self) -> None:
        """Reopen the current tab with the job, as its button does.

        Raises:
            ShardscopeError: The panel cannot show this job.
        """
        self.problem = ""
        box, former, asked = (
            self._tabs.children[TABS.index(self.tab)],
            self._panels.get(self.tab),
            self._plan(),
        )
        if (
            self.tab == PREDICT and former is not None
        ):  # a job that cannot be predicted must not keep its prediction
            box.children = ()
            self._panels.pop(PREDICT).close()
        panel = self._makers[self.tab](*asked)
        self._panels[self.tab], self._jobs[self.tab] = panel, asked
        box.children = (panel,)
        if former is not None:
            former.close()
        if self.tab == PLAN:
            panel.on_train = self._train
        if self.tab == RUN:
            panel.observe(lambda _change: self._tell(), [*JobChoices.class_own_traits()])
            panel.place.choices.observe(lambda _change: self._tell())
        if self._is_shown:
            panel._begin_showing()  # noqa: SLF001 - it is displayed as a part of this panel
        self._draw()

    def _train(self, found: Rehearsal, run: Run) -> None:
        """Show the run of a plan that was started under Plan, its job in the form, and the tab of its mesh."""
        self.tab = RUN
        panel = self._panels[RUN]
        panel.fill(found.job, run.cluster)
        panel.watch(run)
        panel.screen.show_mesh()

    def close(self) -> None:
        """Close all panels; runs continue."""
        for panel in getattr(self, "_panels", {}).values():
            panel.close()
        super().close()

    def _open(self) -> None:
        """Create the panel of the open tab if needed, and update it to the current job or run in focus."""
        self._tabs.selected_index = TABS.index(self.tab)
        self.problem = ""
        if self.tab not in self._panels or (self.tab == PREDICT and self._jobs[PREDICT] != self._plan()):
            self.take()
        if self.tab == RUN:
            self._panels[RUN].screen.forecast.retry()
        run = self._panels[RUN].run if RUN in self._panels else None
        if run is not None and self.tab in SHOWS_A_RUN:
            panel = self._panels[self.tab]
            if self.tab == COMPARE:
                panel.show(run)  # which knows its functions, unlike the runs on disk
            else:
                panel.refresh()
                panel.run_id = run.id
        self._draw()

    def _draw(self) -> None:
        """Show the job, and update the saved picture to the open tab."""
        self._tell()
        if self._is_shown:
            self._watch()
            self._fall_behind(None)

    def _tell(self) -> None:
        """Show the job above the tabs, and offer it to a panel that was opened with another job."""
        job, (before, _) = self.job, self._jobs.get(self.tab, (None, None))
        about = safe(f"{_told(job)}; change the job in the tab {RUN}")
        self._title.value = (
            f'<div class="ss-title"><b role="heading" aria-level="2">Lab</b><span>{about}</span></div>'
        )
        is_other = self.tab in KEEPS_ITS_JOB and before is not None and before != job
        self._offer.layout.display = None if is_other else "none"
        self._other.value = words_html(f"This tab shows {_told(before)}." if is_other and before else "")

    def _begin_showing(self) -> None:
        self._is_shown = True
        for panel in self._panels.values():
            panel._begin_showing()  # noqa: SLF001 - it is displayed as a part of this panel

    def _kept(self) -> list[widgets.Widget | str]:
        kept: list[widgets.Widget | str] = [self._title, self._problem]
        if self.tab in self._panels:
            panel = self._panels[self.tab]
            with panel._guard.lock:  # noqa: SLF001 - a part of this panel
                kept += panel._kept()  # noqa: SLF001
        return kept


def _told(job: Job) -> str:
    return f"{job.label} on {plural(job.world_size, 'rank')}, global batch {job.batch.global_batch:,}"
