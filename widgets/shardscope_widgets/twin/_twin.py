"""The Twin widget: choices as traits, and the callbacks that update the panel."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import traitlets as t

from shardscope.measure.compare.comparison import Comparison, state_of
from shardscope.measure.compare.residual import Expected
from shardscope.runtime import Run, load_job
from shardscope.spec import Job
from shardscope_widgets.figures._twin import twin_info
from shardscope_widgets.kit.background import Background
from shardscope_widgets.kit.form import check_options
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.kit.hit_rate import HitRate
from shardscope_widgets.kit.markup import classed
from shardscope_widgets.kit.own_code import allow, may_call
from shardscope_widgets.kit.run_chooser import RunChooser
from shardscope_widgets.kit.still import Still
from shardscope_widgets.twin._findings import AS_RUN, HERE, Findings
from shardscope_widgets.twin._screen import Screen
from shardscope_widgets.words import listed


class Twin(Still, widgets.VBox, Background):  # type: ignore[misc]
    """Compare a run with its prediction and its simulation: every term, the causes of the difference, and one step.

    The comparison is computed in a separate thread, so that the cell returns at once.

    Args:
        run: The run to show, or its name or path; None shows the newest run.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        choices: Initial values of any traits.

    Example:
        >>> twin = Twin(run)  # doctest: +SKIP
        >>> twin.comparison.residual("simulated").sentence  # as shown below the waterfall  # doctest: +SKIP
    """

    run_id = t.Unicode("", help="Name of the run that is shown; empty if there is none.")
    where = t.Enum(
        (AS_RUN, HERE),
        AS_RUN,
        help="Cluster of the prediction: the run's, or this machine without its links.",
    )
    against = t.Enum(
        ("predicted", "simulated"), "predicted", help="Step time from which the waterfall chart starts."
    )
    step = t.Int(0, min=0, help="The measured step that is drawn; 0 for a typical one.")
    problem = t.Unicode("", help="The last error, as HTML; empty if there is none.")

    def __init__(
        self, run: Run | str | Path | None = None, *, root: str | Path | None = None, **choices: Any
    ) -> None:
        check_options("Twin", choices, self.class_own_traits())
        super().__init__()
        self.findings: Findings | None = None
        self._chooser = RunChooser(run, root)
        self._working = threading.Lock()
        self._jobs: dict[str, Job] = {}  # with the user's functions, by run id
        self._guard = Guard(lambda problem: setattr(self, "problem", problem))
        self.screen = Screen(self._chooser)
        self._hit_rate = HitRate(self.screen.frame, root)
        t.dlink((self, "run_id"), (self.screen.frame, "subject"))
        self._problem = widgets.HTML()
        self.children = (*self.screen.children[:-1], self._problem, self.screen.children[-1])
        classed(self, "ss-lab", "ss-twin")
        self._chooser.offer("")
        self.run_id = self._chooser.first
        for name, value in choices.items():
            setattr(self, name, value)
        self._wire()
        self._begin()

    @property
    def run(self) -> Run | None:
        """The run that is shown; None if there is none."""
        return self._chooser.runs.get(self.run_id)

    @property
    def comparison(self) -> Comparison | None:
        """The comparison that is shown; None while it is being computed, or if there is none."""
        found = None if self.findings is None else self.findings.comparison
        return found if isinstance(found, Comparison) else None

    def refresh(self) -> None:
        """Look for new runs, and read the chosen run up to its newest step."""
        self._chooser.offer(self.run_id)
        if not self.run_id and self._chooser.first:
            self.run_id = self._chooser.first
        else:
            self._begin()

    def _kept(self) -> list[widgets.Widget | str]:
        screen = self.screen
        is_hidden = screen.details.layout.display == "none"
        details = [screen.table, screen.residual, screen.explained, screen.gantt, screen.words]
        return [screen.status, self._problem, *([] if is_hidden else details)]

    def _wire(self) -> None:
        callback, screen = self._guard.callback, self.screen
        widgets.link((self, "against"), (screen.against, "value"))
        screen.run.observe(callback(lambda: setattr(self, "run_id", screen.run.value)), "value")
        screen.where.observe(callback(lambda: setattr(self, "where", screen.where.value)), "value")
        screen.step.observe(callback(lambda: setattr(self, "step", screen.step.value)), "value")
        screen.again.on_click(callback(self.refresh))
        screen.call.on_click(callback(self._allow))
        self.observe(callback(self._begin), ["run_id", "where"])
        self.observe(callback(self._draw_residual), "against")
        self.observe(callback(self._draw_step), "step")
        self.observe(lambda change: setattr(self._problem, "value", change["new"]), "problem")

    def _begin(self) -> None:
        """Start comparing the chosen run, and return at once."""
        run, self.problem, self.findings = self.run, "", None
        self._hit_rate.want(tuple((each.id, each.is_alive) for each in self._chooser.runs.values()))
        if run is None:
            self.screen.hide()
            self.screen.say(self._chooser.why_not(self.run_id))
            return
        self._chooser.mark(run.id)
        self._offer_places(run)
        if may_call(run.job):
            self._jobs[run.id] = run.job
        self.screen.call.layout.display = None if self._needs_permission(run) else "none"
        if self._needs_permission(run):
            self.screen.hide()
            names = listed([code.name for code in run.job.user_functions.values()])
            self.screen.say(
                f"{run.name} has functions of your own ({names}), which are called in this kernel once you press "
                "Predict it."
            )
            return
        self.screen.say(f"{run.name} is being predicted, simulated and compared.", "running")
        self._start(self._work, run, self.where, self._jobs.get(run.id), name="twin")

    def _needs_permission(self, run: Run) -> bool:
        return bool(run.job.user_functions) and run.id not in self._jobs

    def show(self, run: Run) -> None:
        """Show a run, which may have been launched here with functions of the user's own, as of its newest step."""
        self._chooser.give(run)
        self._chooser.offer(self.run_id)
        if self.run_id == run.id:
            self._begin()
        self.run_id = run.id

    def _allow(self) -> None:
        """Load the functions of the run's job, if this kernel launched it, and compare the run."""
        run = self.run
        if run is not None:
            job = run.job if all(code.is_here for code in run.job.user_functions.values()) else load_job(run)
            allow(job)
            self._jobs[run.id] = job
            self._begin()

    def _offer_places(self, run: Run) -> None:
        """Offer the run's own emulated cluster, if it had one, and this machine."""
        where = self.screen.where
        own = [] if run.cluster is None else [(run.cluster.name, AS_RUN)]
        options = [*own, (HERE, HERE if own else AS_RUN)]
        if list(where.options) != options:
            where.options = options
        where.disabled = not own
        if not own:
            self.where = AS_RUN
        where.value = self.where

    def _work(self, run: Run, where: str, job: Job | None) -> None:
        with self._working:  # one at a time; a choice that has changed by then is skipped
            if (run.id, where) != (self.run_id, self.where):
                return
            with self._guard.run(lock=False):
                found = Findings.of(run, where, job)
                with self._guard.lock:
                    if (run.id, where) == (self.run_id, self.where):
                        self._show(found)
                return
        if (run.id, where) == (self.run_id, self.where):
            self.screen.hide()
            self.screen.say("This run cannot be compared.", "failed")

    def _show(self, found: Findings) -> None:
        self.findings = found
        if isinstance(found.comparison, str):
            self.screen.hide()
            self.screen.say(found.comparison, "stopped")
            return
        self.screen.say(found.comparison.verdict, state_of(found.comparison))
        self.screen.draw_comparison(found.comparison)
        self._offer_columns(found.comparison)
        self._offer_steps(found)
        self._draw_residual()
        self._draw_step()

    def _offer_columns(self, found: Comparison) -> None:
        self.screen.against.disabled = "simulated" not in found.columns
        if self.screen.against.disabled:
            self.against = "predicted"

    def _offer_steps(self, found: Findings) -> None:
        options = [("typical", 0), *((str(number), number) for number in sorted(found.steps))]
        if list(self.screen.step.options) != options:
            self.screen.step.options = options

    def _draw_residual(self) -> None:
        found = self.comparison
        if found is not None:
            expected: Expected = "simulated" if self.against == "simulated" else "predicted"
            self.screen.draw_residual(found.residual(expected))

    def _draw_step(self) -> None:
        found = self.findings
        if found is None:
            return
        if self.step not in found.steps:
            self.step = 0
        self.screen.step.value = self.step
        measured = found.measured(self.step or found.typical) if found.typical else None
        info = twin_info(measured, found.simulated, found.predicted, label=found.run.name)
        self.screen.draw_step(info)

    def __repr__(self) -> str:
        return f"Twin({self.run_id or 'no run'})"
