"""The Tuning Lab widget: results of trials, the search settings in a drawer above them, and the callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import traitlets as t

from shardscope.errors import ShardscopeError, StudyError
from shardscope.spec import Job
from shardscope.spec.job_parts import label_of
from shardscope.spec.space import Space
from shardscope.tuning.definition import Definition
from shardscope.tuning.objectives import DEFAULT_OBJECTIVES, OBJECTIVES
from shardscope.tuning.priors import default_space, optimizers_of, with_baselines
from shardscope.tuning.progress import Pace, measuring_text
from shardscope.tuning.records import NOT_BEGUN
from shardscope.tuning.samplers import sampler_of
from shardscope.tuning.session import StudySession
from shardscope.tuning.storage import checked_name
from shardscope_widgets.figures._trials import ORDER, TrialInfo
from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.job_form.options import Options
from shardscope_widgets.kit.clock import Clock
from shardscope_widgets.kit.controls import controls_for
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.kit.markup import classed
from shardscope_widgets.kit.still import Still
from shardscope_widgets.tuning_lab import _controls, _search, _words
from shardscope_widgets.tuning_lab._acts import TrialActs
from shardscope_widgets.tuning_lab._duration import TrialDuration
from shardscope_widgets.tuning_lab._engine import Engine, engine_of
from shardscope_widgets.tuning_lab._job import JobOfChoices
from shardscope_widgets.tuning_lab._pictures import PictureChoices, Pictures
from shardscope_widgets.tuning_lab._screen import TuningScreen
from shardscope_widgets.tuning_lab._settings import StudyChoices
from shardscope_widgets.tuning_lab._study import Shown, missing, reopened
from shardscope_widgets.tuning_lab._summary import StudySummary

BEAT_S = 0.3
LOOK_AT_OTHERS_EVERY_S = 2.0
DRAW_RUN_EVERY_S = 0.8


class TuningLab(Still, widgets.VBox, StudyChoices, TrialActs):  # type: ignore[misc]
    """Widget to choose a job and a search space, run trials, watch the Pareto front grow, and use a trial's settings.

    Constructing a lab starts nothing. The study is stored in its storage and its trials in run directories. After a
    reload of the page or a restart of the kernel, a new lab with the same name shows the whole study with its original
    settings and can resume it. A summary below the lab stays readable in a notebook without a kernel.

    Args:
        job: What to train; None uses the definition of the existing study `name`, or a small job if there is none.
        space: Search space; None uses the default space for the job, which the controls can change.
        name: Name of the study; model and strategy by default.
        root: Folder for runs and studies; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        storage: An Optuna storage or its URL, to use several machines; None keeps a journal file next to the runs.
        objectives: What to minimise, as for `tune`; pass your own functions as ``{"loss": None, "mine": f}``.
        choices: Initial values of any traits, and other arguments of `tune`.

    Example:
        >>> lab = TuningLab(ss.Job(model="mlp", data="digits"), trials=20)  # doctest: +SKIP
        >>> lab.start()  # what the button does  # doctest: +SKIP
    """

    status = t.Unicode("", help="Status of the study, in words.")
    problem = t.Unicode("", help="The last error, as HTML; empty if there is none.")

    def __init__(
        self,
        job: Job | None = None,
        space: Space | Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        root: Path | str | None = None,
        storage: Any = None,
        objectives: Sequence[str] | Mapping[str, Any] | None = None,
        **choices: Any,
    ) -> None:
        self._guard = Guard(lambda problem: setattr(self, "problem", problem))
        self._root, self._storage = (Path(root) if root is not None else None), storage
        self._own = (
            {n: f for n, f in objectives.items() if f is not None} if isinstance(objectives, Mapping) else {}
        )
        self._given = job
        self._space = space if isinstance(space, Space) or space is None else Space(parameters=dict(space))
        self._shown: Shown | None = None
        self._summary = StudySummary()
        self._trials: list[TrialInfo] = []
        self._looked_at = self._drew_run_at = 0.0
        self._duration, self._pace = TrialDuration(), Pace()
        self._paced: StudySession | None = None
        self._is_setting_up, self._was_running = True, False
        StudyChoices.__init__(self)
        super().__init__()
        self._jobs = JobOfChoices(self)
        self.set_trait(
            "objectives",
            [objectives] if isinstance(objectives, str) else list(objectives or DEFAULT_OBJECTIVES),
        )
        self._options = self.choose(choices)
        self._begin(name, asked=choices)
        self._build()
        self._is_setting_up = False
        self._clock = Clock(self._beat, interval_s=BEAT_S)
        self.refresh()
        self._clock.start()

    # Setting up.

    def _begin(self, name: str | None, *, asked: Collection[str]) -> None:
        """Set up from the given job, else the existing study with this name, else a small job."""
        if self._given is not None:
            self._jobs.take(self._given)
        self.set_trait("name", name or ("" if self._given is None else self._usual_name()))
        if not self.name:
            self._jobs.take_defaults()
            self.set_trait("name", self._usual_name())
        with self._guard.run():
            self._find(is_shown_as_begun=self._given is None, asked=asked)
        if self._given is None and self.session is None:
            self._jobs.take_defaults()
        if not self.search:
            self._offer(self._space)

    def _usual_name(self) -> str:
        job = self._jobs.base or self.job()
        return f"{label_of(job.model)}-{job.strategy.name}"

    def _find(self, *, is_shown_as_begun: bool, asked: Collection[str] = ()) -> None:
        """Show the study with this name if it exists.

        Args:
            is_shown_as_begun: Whether to set the controls to the definition of the study.
            asked: Names of the choices to leave unchanged, even if the study was created with other values.
        """
        self._shown, self._trials = None, []
        self._summary.forget()
        self._engine: Engine = engine_of(self._root, self._storage, self.name)
        if hasattr(self, "pictures"):
            self.pictures.forget()
        session = self._engine.session or reopened(self.name, self._storage, self._root, self._own)
        if session is None:
            return
        self._shown = Shown(session)
        known = sum(record.counted and record.state not in NOT_BEGUN for record in session.records())
        self.set_trait("trials", max(self.trials if "trials" in asked else session.driver.trials, known))
        if "baselines" not in asked and session.definition.baselines is not None:
            self.set_trait("baselines", session.definition.baselines)
        if is_shown_as_begun:
            self._show_definition(session.definition)
        elif self._space is None and session.definition.batch_range is not None:
            self._offer(session.definition.searched)  # its batch sizes were chosen when the study was created

    def _show_definition(self, definition: Definition) -> None:
        self._given = None
        self._options.pop("equal", None)
        self._jobs.take(definition.job)
        self.set_trait("objectives", list(definition.objectives))
        self._offer(definition.searched)

    def _offer(self, space: Space | None) -> None:
        """Create rows for the settings that can be searched, and switch on the rows of settings in `space`."""
        self._rows = _search.rows_of(self.job(), space)
        self.set_trait("search", _search.first_state(self._rows))

    def _build(self) -> None:
        self.controls = {
            "job": _controls.job_controls(self), "study": controls_for(self, _controls.STUDY),
            "link": controls_for(self, _controls.LINK), "axes": controls_for(self, _controls.AXES),
            "search": controls_for(self, _controls.SEARCH),
        }  # fmt: skip
        self.minimise = _controls.objectives_picker(self._own_names())
        self.screen = TuningScreen(
            self.controls["job"], Options(self, "strategy"), self.controls["study"], self.controls["link"],
            self.controls["axes"], self.minimise, self.controls["search"]["baselines"],
        )  # fmt: skip
        t.dlink((self, "name"), (self.screen.frame, "subject"))
        self.pictures = Pictures(self.screen, self._guard)
        self._offer_axes()
        self.children = self.screen.children
        classed(self, "ss-lab", "ss-tuning")
        self._wire()

    def _wire(self) -> None:
        screen, callback = self.screen, self._guard.callback
        t.link((self, "search"), (screen.space, "state"))
        screen.start.on_click(callback(self.start))
        screen.stop.on_click(callback(self.stop, lock=False))
        acts: dict[str, Callable[[], object]] = {
            "open": self.open_run,
            "prune": self._prune_chosen,
            "pin": self.pin,
            "apply": self.apply,
            "again": self.again,
        }
        for key, act in acts.items():
            screen.chosen.buttons[key].on_click(callback(act))
        self.observe(
            callback(self._replan),
            [*JobChoices.class_own_traits(), "trials", "objectives", "search", "sampler", "baselines"],
        )
        self.observe(callback(self._take_name), "name")
        self.observe(callback(self._take_budget), ["trials", "parallel"])
        self.observe(callback(self._offer_axes), "objectives")
        self.observe(callback(self._switch_link), "is_relinked")
        self.observe(callback(self._draw), ["x", "y", "colour", "is_relinked", "on_bandwidth", "on_latency"])
        self.observe(callback(self._choose_trial), "chosen")
        self.observe(lambda change: setattr(screen.problem, "value", change["new"]), "problem")
        self.minimise.observe(callback(self._take_objectives), "state")
        screen.table.observe(self._take_row, "chosen")
        for figure in (screen.front, screen.curves, screen.slices, screen.parallel):
            figure.observe(self._take_click, "clicked")
        screen.tabs.observe(callback(self._draw), "selected_index")
        screen.problem.value = self.problem
        self._show_rows()
        self._switch_link()
        self._replan()

    # Interface for code.

    @property
    def session(self) -> StudySession | None:
        """Session of the study; None until the study exists."""
        return self._shown.session if self._shown else None

    @property
    def is_running(self) -> bool:
        """Whether this kernel is running trials."""
        return self._engine.is_running

    def job(self) -> Job:
        """Return the job that the controls describe.

        Raises:
            SpecError: The choices are incompatible.
        """
        return self._jobs.job()

    def definition(self) -> Definition:
        """Return the definition of the study that the controls describe.

        Raises:
            SpecError: The definition is invalid; the message says why.
            StudyError: The existing study has a different definition, or user-defined objectives must be passed again.
        """
        checked_name(self.name)
        job, begun = self.job(), self.session.definition if self.session else None
        searched = _search.space_of(self._rows, self.search, job)
        is_unsaid = begun is not None and begun.baselines is None
        baselines = None if is_unsaid else self.baselines
        found = Definition(
            job=job, space=with_baselines(searched) if baselines else searched, objectives=tuple(self.objectives),
            own=self._own_names(), baselines=baselines, drawn=optimizers_of(searched) if baselines else None,
            equal=self._options.get("equal", begun.equal if begun else "samples"),
        )  # fmt: skip
        sampler_of(self.sampler, seed=0, num_objectives=len(found.objectives))
        difference = begun.difference(found) if begun else None
        if difference is not None:
            raise StudyError(
                f"study {self.name!r} was created with other arguments: {difference}; resume with the original "
                "arguments, or give the new study another name"
            )
        lacking = missing(self.session, self._own)
        if lacking is not None:
            raise StudyError(lacking)
        return found

    def _own_names(self) -> tuple[str, ...]:
        """Return the names of the user-defined objectives, including those whose functions were not passed again."""
        begun = self.session.definition.own if self.session else ()
        return tuple(dict.fromkeys([*begun, *self._own]))

    def start(self) -> None:
        """Start running trials until the study is complete, as the Start button does; return at once (see `wait`).

        Raises:
            ShardscopeError: The definition of the study is invalid.
        """
        definition = self.definition()
        self.problem = ""
        is_known = (
            self.session is not None and self._given is None
        )  # the definition is then read from the storage
        space = None if definition.searched == default_space(definition.job) else definition.searched
        about = (None, None) if is_known else (definition.job, space)
        functions = {name: self._own.get(name) for name in definition.objectives}
        asked: dict[str, Any] = {
            "trials": self.trials, "parallel": self.parallel, "sampler": self.sampler, "name": self.name,
            "objectives": functions, "storage": self._storage, "root": self._root,
            **self._options, "baselines": definition.baselines,
            "on_probe": lambda probe: setattr(self._engine, "before", measuring_text(probe)),
        }  # fmt: skip
        self._engine.start(lambda stopping: StudySession.open(*about, stopping=stopping, **asked))
        self._say_state()

    def stop(self) -> None:
        """Stop the trials, as the Stop button does, and return at once.

        When the study is resumed, interrupted trials are rerun first.
        """
        self._engine.stop()
        self._say_state()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no trials are running; return False if trials are still running after `timeout` seconds."""
        ended = self._engine.wait(timeout)
        self.refresh()
        return ended

    def refresh(self) -> None:
        """Read the study and redraw everything now instead of at the next tick of the clock."""
        with self._guard.run():
            self._looked_at = self._drew_run_at = 0.0
            self._update()
            self._draw()

    def close(self) -> None:
        """Close the lab and stop its trials; the study is kept and can be resumed."""
        if hasattr(self, "_clock"):
            self._clock.stop()
            self._engine.stop()
        super().close()

    def __repr__(self) -> str:
        return f"TuningLab({self.name!r}, {self.status})"

    # What the controls do.

    def _replan(self) -> None:
        """Show what the Start button would do, or why it is disabled."""
        if self._is_setting_up and not hasattr(self, "screen"):
            return
        box = self.screen.baselines
        try:
            self.screen.space.hidden = _search.hidden(self._rows, self.search, self.job())
            definition = self.definition()
        except ShardscopeError as error:
            self._is_possible = False
            self.screen.say_plan(str(error), is_possible=False)
        else:
            self._is_possible = True
            self._planned = definition
            box.layout.display = None if optimizers_of(definition.space) else "none"
            box.description = _words.baselines_text(definition)
        self._say_state()

    def _take_name(self) -> None:
        self.chosen, self.problem = -1, ""
        with self._guard.run():
            self._find(is_shown_as_begun=True)
        self.minimise.rows = _controls.objective_rows(self._own_names())
        self._show_rows()
        self._replan()
        self.refresh()

    def _show_rows(self) -> None:
        picker = self.screen.space
        with picker.hold_sync():
            picker.rows, picker.state = _search.as_shown(self._rows), self.search
        names = [*self.minimise.rows[0]["options"]]
        picked = [names.index(name) for name in self.objectives if name in names]
        self.minimise.state = {"objectives": {"on": True, "picked": picked}}

    def _take_objectives(self) -> None:
        names = self.minimise.rows[0]["options"]
        self.objectives = [names[place] for place in self.minimise.state["objectives"]["picked"]]

    def _take_budget(self) -> None:
        if self._engine.session is not None and self.is_running:
            self._engine.session.driver.trials = self.trials
            self._engine.session.driver.parallel = self.parallel

    def _offer_axes(self) -> None:
        """Offer every objective as an axis; by default quality is vertical and a cost, if there is one, horizontal."""
        axes = self.controls["axes"]
        self.x, self.y = _controls.usual_axes(self.objectives, self._own_names(), (self.x, self.y))
        for name, control in axes.items():
            more = (ORDER,) if name == "x" else ()
            options = list(dict.fromkeys([*self.objectives, *OBJECTIVES, *self._own_names(), *more]))
            if options != list(control.options):
                kept = getattr(self, name)
                control.options = options
                control.value = kept if kept in options else options[0]

    def _switch_link(self) -> None:
        """Hide the link sliders unless the prediction of times on another link is switched on."""
        for name in ("on_bandwidth", "on_latency"):
            self.controls["link"][name].layout.display = None if self.is_relinked else "none"

    def _take_row(self, change: dict[str, Any]) -> None:
        with self._guard.run():
            self.chosen = change["new"]  # the table's own value may have been drawn over while this waited

    def _take_click(self, change: dict[str, Any]) -> None:
        if change["new"] >= 0:
            with self._guard.run():
                self.chosen = change["new"]
                change["owner"].clicked = -1  # so that the same point can be clicked again

    def _choose_trial(self) -> None:
        self.pictures.leave_run()
        self._draw()
        self._draw_run()

    # Results of trials.

    def _beat(self) -> None:
        with self._guard.run():
            self._update()

    def _update(self) -> None:
        """Read new results and draw what they change."""
        session = self._engine.session
        if session is not None and (self._shown is None or self._shown.session is not session):
            self._shown = Shown(session)
            if session.definition.batch_range is not None:
                self._offer(session.definition.searched)
                self._show_rows()
        error, self._engine.error = self._engine.error, None
        if error is not None:
            with self._guard.run():
                raise error
        now = time.monotonic()
        running, before = self.is_running, self._was_running
        self._was_running = running  # read once more after the end, to catch the last changes
        due = running or before or now - self._looked_at > LOOK_AT_OTHERS_EVERY_S
        if self._shown is not None and due:
            self._looked_at = now
            trials = self._shown.trials(self._engine.live())
            if running and self._paced is not session:
                self._paced, self._pace = session, Pace(_words.num_ended(trials))
            if trials != self._trials:
                self._trials = trials
                self._draw()
            self._summary.tell(self._shown, trials, self.trials, is_running=running)
        self._say_state()
        if now - self._drew_run_at > DRAW_RUN_EVERY_S:
            self._drew_run_at = now
            self._draw_run()
            if self.pictures.has_more():
                self._draw()

    def _say_state(self) -> None:
        if getattr(self, "_is_possible", False):
            counted = sum(trial.is_counted and trial.state not in NOT_BEGUN for trial in self._trials)
            self._duration.want(self._planned.job)
            text = _words.plan_text(
                self._planned,
                self.trials,
                counted,
                is_running=self.is_running,
                trial_s=self._duration.seconds,
                parallel=self.parallel,
            )
            why = self.session.definition.batches if self.session else None
            self.screen.say_plan(f"{text} {why}" if why else text, is_possible=True)
        running = self.is_running
        doing = "stopping" if self._engine.is_stopping else "running" if running else "idle"
        self.status = _words.status_text(
            self.name, self._trials, self.trials, doing, before=self._engine.before,
            ended=self.session.driver.used_up if self.session and not running else "",
            left=self._time_left(running=running),
        )  # fmt: skip
        finished = "has finished" in self.status
        state = "running" if running else "completed" if finished else "stopped" if self._trials else "idle"
        share = _words.num_ended(self._trials) / self.trials if running else None
        self.screen.say_status(self.status, state, share)
        self.screen.start.disabled = running or not getattr(self, "_is_possible", False)
        self.screen.start.description = "Continue" if self._trials and not running else "Start"
        self.screen.stop.disabled = not running or self._engine.is_stopping
        self.screen.space.locked = self.minimise.locked = running
        self.screen.baselines.disabled = running

    def _time_left(self, *, running: bool) -> str:
        is_paced = running and self._paced is self._engine.session
        return self._pace.left_text(_words.num_ended(self._trials), self.trials) if is_paced else ""

    def _draw(self) -> None:
        """Draw the visible parts that show all trials."""
        if not self._is_setting_up:
            look = PictureChoices(
                self.x, self.y, self.colour, self.chosen, self.other_link(), tuple(self.objectives)
            )
            self.pictures.draw(self.session, self._trials, look)

    def _draw_run(self) -> None:
        """Draw the chosen trial, and its run if that is open."""
        if not self._is_setting_up:
            ours = self._engine.session is self.session and self.chosen is not None
            can_prune = ours and self._engine.can_prune(self.chosen)
            self.pictures.draw_run(self._shown, self.chosen, can_prune=can_prune)

    # The picture in a saved notebook.

    def _kept(self) -> list[widgets.Widget | str]:
        screen = self.screen
        return [
            screen.status,
            screen.problem,
            screen.front,
            screen.front_words,
            screen.curves,
            self._summary.html,
        ]
