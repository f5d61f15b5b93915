"""The Training Lab widget: inputs on the left, results of the runs on the right, and the callbacks between them."""
# Long because the lab connects every part to every other; each part has a module of its own.

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import traitlets as t

from shardscope.errors import ShardscopeError
from shardscope.spec.settings import settings_of
from shardscope_widgets.fault_lab import Breaker, Resumer, carry_on
from shardscope_widgets.figures._overview import MOST_RUNS
from shardscope_widgets.html import summary_html
from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.job_form.from_job import choices_of
from shardscope_widgets.job_form.place import recorded_on
from shardscope_widgets.job_form.topics import reset
from shardscope_widgets.kit.clock import Clock
from shardscope_widgets.kit.form import check_options
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.kit.hit_rate import HitRate
from shardscope_widgets.kit.still import Still
from shardscope_widgets.kit.threads import panel_thread
from shardscope_widgets.training_lab import _words
from shardscope_widgets.training_lab._advice import AdvicePanel, Subject
from shardscope_widgets.training_lab._check import CheckPanel
from shardscope_widgets.training_lab._ghosts import Ghosts
from shardscope_widgets.training_lab._place import Place
from shardscope_widgets.training_lab._presets import Preset, preset_named
from shardscope_widgets.training_lab._queue import ChangeQueue
from shardscope_widgets.training_lab._runbook import RunBook, RunEntry
from shardscope_widgets.training_lab._screen import Screen
from shardscope_widgets.training_lab._stage import Stage
from shardscope_widgets.training_lab._table import RunsTable

if TYPE_CHECKING:
    from shardscope.runtime import Run
    from shardscope.spec import Job
    from shardscope.spec.cluster import EmulatedCluster
    from shardscope_widgets.trace import Trace

SHOWN_AT_FIRST = 4
LOOK_FOR_RUNS_EVERY_S = 2.0
DRAW_DETAILS_EVERY_S = 0.5
WAIT_S = 0.02


class TrainingLab(Still, widgets.VBox, JobChoices):  # type: ignore[misc]
    """Choose a job, start it on real ranks, follow its progress, and compare several runs in the same plots.

    Constructing a lab does not start any rank. Runs are stored on disk: after a reload of the page or a restart of
    the kernel, a new lab shows them all and follows those that are still running.

    Args:
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        preset: Title of a preset that sets the form initially, such as ``"Break the bubble"``; None for none.
        choices: Initial values of `JobChoices` traits, for example ``model=make_model, strategy="ring:2"``. They take
            precedence over the preset.

    Example:
        >>> lab = TrainingLab(model="gpt-nano", strategy="ring", world_size=2)  # doctest: +SKIP
        >>> lab.start()  # what the button does  # doctest: +SKIP
        >>> lab.play("Watch a ring")  # what a chip does  # doctest: +SKIP
    """

    shown = t.List(t.Unicode(), help="Ids of the runs shown in the plots, oldest first.")
    focus = t.Unicode(
        "", help="Id of the run in focus: its timeline and recorded step are shown, and `stop` stops it."
    )
    status = t.Unicode("", help="Status of the run in focus, in words.")
    group = t.Unicode("", help="Group of the runs that are listed and shown; see `Run.group`.")
    problem = t.Unicode("", help="The last error, as HTML; empty if there is none.")

    def __init__(self, *, root: Path | str | None = None, preset: str | None = None, **choices: Any) -> None:
        chosen = None if preset is None else preset_named(preset)
        self._guard = Guard(lambda problem: setattr(self, "problem", problem))
        self._book = RunBook(Path(root) if root is not None else None)
        self._seen_at = self._detailed_at = 0.0
        self._planned: tuple[Job, EmulatedCluster | None] | None = None
        self._due = self._stale = self._has_chosen = self._is_filling = False
        self._is_empty = True
        self._of_preset: dict[str, str] = {}
        JobChoices.__init__(self)
        super().__init__()
        self.check = CheckPanel(self._guard.callback(self._replan))
        table = RunsTable(self._guard, self._redraw, self._forget)
        advice, ghosts = AdvicePanel(self._press_try), Ghosts(self._redraw)
        self._queue = advice.queue = ChangeQueue(self._book, self._try)
        breaker = Breaker(self._guard, self.resume)
        resumer = Resumer(self.resume)
        resumer.button.on_click(self._guard.callback(resumer.press))
        self.place = Place(self, self._guard.callback(self._take_place))

        self.screen = Screen(
            self, check_box=self.check.box, advice=advice, ghosts=ghosts, table=table, breaker=breaker,
            place=self.place, resumer=resumer, on_preset=self._press_chip,
            on_found=self._guard.callback(self._draw_step),
        )  # fmt: skip
        self._hit_rate = HitRate(self.screen.frame, root)
        t.dlink((self, "focus"), (self.screen.frame, "subject"))
        self.stage = Stage(self.screen)
        if chosen is not None:
            self._take_preset(chosen)
        self._choose(choices)
        self.children = self.screen.children
        self.add_class("ss-lab")
        self._wire()
        if chosen is not None:
            self._has_chosen = True  # no earlier run is shown
            self.screen.presets.mark(chosen)
        self._clock = Clock(self._beat)
        self.refresh()
        self._clock.start()

    def _choose(self, choices: dict[str, Any]) -> None:
        check_options("TrainingLab", choices, JobChoices.class_own_traits())
        for name in sorted(choices, key=lambda name: (name in {"lr", "latency"}, name.endswith("options"))):
            setattr(self, name, choices[name])

    def _wire(self) -> None:
        screen, callback = self.screen, self._guard.callback
        screen.start.on_click(callback(self.start))
        screen.stop.on_click(callback(self.stop, lock=False))
        screen.check.on_click(callback(self._press_check))
        self.observe(callback(self._replan), [*JobChoices.class_own_traits()])
        self.observe(callback(screen.presets.forget), [*JobChoices.class_own_traits()])
        self.observe(callback(self._refocus), ["focus", "shown"])
        self.observe(lambda change: setattr(screen.problem, "value", change["new"]), "problem")
        screen.history.observe(callback(self._take_ticks), "shown")
        screen.history.observe(callback(self._take_group), "group")
        screen.history.observe(callback(self._take_tools), "shows_tools")
        self.observe(callback(self._show_group), "group")
        screen.live.focus.observe(callback(self._take_focus), "value")
        screen.live.last_step.observe(callback(self._take_step), "value")
        for control in (screen.live.window, screen.live.follow):
            control.observe(callback(self._draw_details), "value")
        self._replan()

    # The API for code.

    @property
    def run(self) -> Run | None:
        """The run in focus: the last run started, unless another run was selected; None if there is no run."""
        entry = self._book.entries.get(self.focus)
        return entry.run if entry else None

    @property
    def runs(self) -> list[Run]:
        """All runs on disk, newest first."""
        return [entry.run for entry in reversed(self._book.entries.values())]

    @property
    def is_running(self) -> bool:
        """Whether the run in focus is still running."""
        return self.run is not None and self.run.is_alive

    def start(self) -> Run:
        """Start the job that the controls describe, as the Start button does.

        Raises:
            ShardscopeError: The job is invalid or the ranks cannot be started.
        """
        from shardscope.runtime import launch

        (job, cluster), anyway = self._plan(), self.screen.forecast.anyway.value
        run = launch(job, cluster, root=self._book.root, preflight=not anyway)
        self.watch(run)
        return run

    def play(self, preset: str | Preset) -> Run:
        """Set the form to a preset, play its predicted step, and start its job, as the preset's chip does.

        Raises:
            SpecError: The preset does not exist.
            ShardscopeError: The ranks cannot be started.
        """
        chosen = preset_named(preset) if isinstance(preset, str) else preset
        former = self.run if self.screen.follow.value else None
        self._take_preset(chosen)
        self.screen.presets.mark(chosen)
        run = self.start()
        self._stop_run(former)
        self.screen.follow.value = True
        self._of_preset[chosen.title] = run.id
        self.shown = [*self._known([self._of_preset.get(chosen.beside, "")]), run.id]
        return run

    def _take_preset(self, preset: Preset) -> None:
        """Set the form and the place to a preset, and open its tab."""
        is_emulated = self.place.can_emulate()
        self._is_filling = True  # a partly set form is neither planned nor drawn
        try:
            self.place.choose(None)
            reset(self, preset.choices if is_emulated else {**preset.choices, **preset.here})
            self.place.choose(preset.place if is_emulated else None)
        finally:
            self._is_filling = False
        self._replan()
        self._is_empty = False
        self.screen.show_step()

    def resume(self, run: Run) -> Run:
        """Start a run that continues `run` from its newest checkpoint, as the Resume button does.

        A run without a checkpoint is started again.

        Raises:
            ShardscopeError: The run cannot be resumed.
        """
        resumed = carry_on(run, self._book.root)
        self.watch(resumed)
        return resumed

    def fill(self, job: Job, cluster: EmulatedCluster | None = None) -> None:
        """Set all controls to a job and its emulated cluster; `problem` names the settings that have no control."""
        self.place.choices.take(None)
        reset(self, choices_of(job))
        self.place.choices.take(cluster)
        self.problem = _words.without_control_html(
            *(recorded_on(each, cluster) for each in (job, self.job()))
        )

    def clear(self) -> None:
        """Show no run, only what is predicted for the job in the form; all runs stay in the list."""
        with self._guard.lock:
            self.shown, self.focus = [], ""
            self._has_chosen = self._is_empty = True
            self.screen.show_step()
            self.refresh()

    def start_check(self) -> None:
        """Check the job that the controls describe against a single-process run, as the Check button does.

        Returns at once; ``lab.check.wait()`` returns the report.

        Raises:
            ShardscopeError: The job is invalid.
        """
        self.check.start(self.job(), self._book.root)

    def watch(self, run: Run) -> None:
        """Show a run that was started elsewhere, for example in a notebook cell, and put it in focus.

        Only this run and its baseline, if it has one, are ticked; tick other runs to compare them.
        """
        with self._guard.lock:
            self._book.add(run)
            self.problem = ""
            self.check.clear()
            self.shown = [*self._known([run.baseline or ""]), run.id]
            self.focus = run.id
            self.stage.is_watching = True  # also if it was in focus before the form was changed
            self.refresh()

    def _known(self, run_ids: Sequence[str]) -> list[str]:
        return [run_id for run_id in run_ids if run_id in self._book.entries]

    def stop(self) -> None:
        """Stop the run in focus, as the Stop button does. Returns at once; use `wait` to wait for its end.

        A change of the run that waits for its end then starts.
        """
        self.screen.follow.value = False
        if self.run is not None:
            self._queue.expect_stop(self.run)
        self._stop_run(self.run)

    def _stop_run(self, run: Run | None) -> None:
        if run is not None:
            act = self._guard.callback(run.stop, lock=False)
            panel_thread(act, name="stop").start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the run in focus to end; return False if it is still running after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_running and (deadline is None or time.monotonic() < deadline):
            time.sleep(WAIT_S)
        self.refresh()
        return not self.is_running

    def refresh(self) -> None:
        """Read all runs on disk and redraw everything now instead of at the next tick of the clock."""
        with self._guard.run():
            self._seen_at = self._detailed_at = 0.0
            self._update(everything=True)

    def close(self) -> None:
        """Close the lab and cancel a running check; runs continue."""
        if hasattr(self, "_clock"):
            self._clock.stop()
            self.check.cancel()
        super().close()

    def __repr__(self) -> str:
        return f"TrainingLab({len(self._book.entries)} runs, {self.status})"

    # Callbacks of the controls.

    def _replan(self) -> None:
        """Show what the Start button would do, or why the job is invalid."""
        if self._is_filling:
            return
        self.screen.controls["world_size"].disabled = self.num_ranks == 1 or bool(self.degrees)
        self.screen.say_checking(is_checking=self.check.is_running)
        self._planned = None
        try:
            job, cluster = self._planned = self._plan()
        except ShardscopeError as error:
            self.screen.say_plan(str(error), is_possible=False)
            self.screen.forecast.want(None)
            self.stage.cancel()
            self.screen.check.disabled = not self.check.is_running
        else:
            text = f"{_words.strategy_text(self.strategy)} {_words.plan_text(job, cluster)}"
            self.screen.say_plan(text, is_possible=True)
            self.screen.forecast.want(job, cluster)
            entry = self._book.entries.get(self.focus)
            self.stage.form_changed(entry, is_own=self._is_own(entry))
            self._draw_step()
            self.screen.check.disabled = job.world_size == 1 and not self.check.is_running

    def _plan(self) -> tuple[Job, EmulatedCluster | None]:
        self.place.choices.cluster()  # first, because job() never sees too many nodes, so its error would mislead
        job = self.job()
        return job, self.place.cluster_for(job)

    def _take_place(self) -> None:
        self.screen.topics.name()
        self.screen.presets.forget()
        self._replan()

    def _press_try(self, run: Run, change: Mapping[str, Any]) -> None:
        with self._guard.run():
            self._queue.press(run, change, is_busy=self.check.is_running)
            self._want_advice()

    def _try(self, run: Run, change: Mapping[str, Any], has_waited: bool) -> None:
        """Start the job of a run with a change, and show it in the form, unless the form was changed in the
        meantime.
        """
        from shardscope.runtime import launch

        job = run.job.replace(**change, name=None)
        started = launch(job, run.cluster, root=self._book.root, group=run.group)
        started.baseline = run.id
        follows = self._describes(run.job, run.cluster)
        self.watch(started)
        if follows or not has_waited:
            with self.screen.presets.kept() if follows else nullcontext():
                self.fill(job, run.cluster)

    def _describes(self, job: Job, cluster: EmulatedCluster | None) -> bool:
        """Return whether the form shows this job on this cluster; a cluster of None is this machine."""
        if self._planned is None:
            return False
        planned, where = self._planned
        first, second = (settings_of(recorded_on(each, cluster)) for each in (planned, job))
        return where == cluster and first == second

    def _press_chip(self, preset: Preset) -> None:
        with self._guard.run():
            self.play(preset)

    def _press_check(self) -> None:
        if self.check.is_running:
            self.check.cancel()
        else:
            self.start_check()

    def _forget(self, run: Run) -> None:
        """Stop showing a run that has been deleted."""
        self._book.entries.pop(run.id, None)
        self.shown = [other for other in self.shown if other != run.id]
        self.refresh()

    def _take_group(self) -> None:
        self.group = self.screen.history.group

    def _take_tools(self) -> None:
        self._book.shows_tools = self.screen.history.shows_tools
        self.refresh()

    def _show_group(self) -> None:
        """Show the newest runs of the group, unless some of its runs are already shown."""
        own = self._book.of_group(self.group)
        if not any(run_id in own for run_id in self.shown):
            self.shown = [*own][-SHOWN_AT_FIRST:]

    def _take_ticks(self) -> None:
        self.shown = self.screen.history.shown[-MOST_RUNS:]

    def _take_focus(self) -> None:
        if self.screen.live.focus.value and not self.screen.live.is_offering:
            self.focus = self.screen.live.focus.value

    def _take_step(self) -> None:
        if not self.screen.live.is_offering:
            self.screen.live.follow.value = False
            self._draw_details()

    def _refocus(self) -> None:
        self._has_chosen = self.stage.is_watching = True
        self._keep_to_one_group()
        if self.focus not in self.shown:
            self.focus = self.shown[-1] if self.shown else ""
        if self.shown and self._is_empty:
            self._is_empty = False
            self.screen.show_live()
        self.problem = ""
        self.refresh()

    def _keep_to_one_group(self) -> None:
        """Show only runs of the group of the run added last; runs of several groups would make the plots unreadable."""
        newest = self._book.entries.get(self.shown[-1]) if self.shown else None
        if newest is None:
            return
        own = self._book.of_group(newest.trace.group)
        if any(run_id not in own for run_id in self.shown):
            self.shown = [run_id for run_id in self.shown if run_id in own]
        self.group = newest.trace.group

    # Updates from the runs.

    def _beat(self) -> None:
        with self._guard.run():
            self._update()

    def _update(self, *, everything: bool = False) -> None:
        """Read new events and redraw the parts that they change."""
        now = time.monotonic()
        if everything or now - self._seen_at > LOOK_FOR_RUNS_EVERY_S:
            self._seen_at = now
            everything |= self._book.find()
            if not self._has_chosen and self._book.entries:
                self._follow_newest()
        alive = {run_id for run_id, entry in self._book.entries.items() if entry.is_alive}
        changed = self._book.poll(self.shown)
        self.screen.ghosts.want([entry.run for entry in self._shown_entries()])
        if changed or everything or self._stale:
            self._stale = False
            self._draw_runs()
            self._due = True
        for run_id in alive & changed:
            self._ended(self._book.entries[run_id])
        if self._due and now - self._detailed_at > DRAW_DETAILS_EVERY_S:
            self._detailed_at, self._due = now, False
            self._draw_details()
            self.screen.draw_summary(self._shown_entries())
        if self.stage.must_follow(self._book.entries.get(self.focus)):
            self._follow_form()
        self._queue.update(is_busy=self.check.is_running)
        self._hit_rate.want(tuple((run_id, entry.is_alive) for run_id, entry in self._book.entries.items()))
        self._want_advice()

    def _follow_form(self) -> None:
        """Start the job that the form now describes, then stop the run in focus; if the start fails, that run
        continues.
        """
        former = self.run
        self.start()
        self._stop_run(former)

    def _draw_step(self) -> None:
        """Play the predicted step of the form's job, or of the run in focus, above the run's measured step."""
        entry = self._book.entries.get(self.focus)
        self.stage.draw(entry, is_own=self._is_own(entry))

    def _is_own(self, entry: RunEntry | None) -> bool:
        return entry is not None and self._describes(entry.run.job, entry.cluster)

    def _follow_newest(self) -> None:
        """Show the newest runs of the newest group, until a run starts or the user chooses other runs."""
        newest = [*self._book.entries][-1]
        entry = self._book.entries[newest]
        self._has_chosen = (
            True  # the changes below are not a person's choice, nor do they call this method again
        )
        self.group = entry.trace.group
        if newest not in self.shown:
            self.shown = [newest] if entry.is_alive else [*self.shown, newest][-MOST_RUNS:]
            self.focus = newest
        self._has_chosen = entry.is_alive

    def _redraw(self) -> None:
        """Redraw everything at the next tick of the clock."""
        self._stale = True

    def _shown_entries(self) -> list[RunEntry]:
        return [self._book.entries[run_id] for run_id in self.shown if run_id in self._book.entries]

    def _shown_traces(self) -> list[Trace]:
        return [entry.trace for entry in self._shown_entries()]

    def _focus_trace(self) -> Trace | None:
        entry = self._book.entries.get(self.focus)
        return entry.trace if entry else None

    def _draw_runs(self) -> None:
        self._book.name(self.shown)
        self.screen.history.offer(self._book.groups, self.group)
        own = self._book.of_group(self.group)
        self.screen.draw_runs(own, self._shown_entries(), self.focus, self._book.skipped)
        entry = self._book.entries.get(self.focus)
        ghost = self.screen.ghosts.found.get(self.focus)
        known = None if entry is None else entry.predicted
        predicted_s = known.step_time_s if known else ghost and ghost.step_s
        self.status = _words.status_text(entry, predicted_s)
        self.screen.draw_status(entry, self.status, _words.status_state(entry, predicted_s))
        if entry is not None and entry.state == "failed":
            self.problem = self.screen.failure_of(entry) or self.problem

    def _draw_details(self) -> None:
        self.screen.draw_details(self._focus_trace(), self._shown_traces())
        self._draw_step()
        entry = self._book.entries.get(self.focus)
        self.screen.draw_faults(entry)
        is_over = entry is not None and not entry.is_alive and bool(entry.trace.steps)
        ended = entry.run if entry is not None and is_over else None
        self.screen.outcome.want(ended)
        is_idle = not any(each.is_alive for each in self._book.entries.values())
        self.screen.payoff.want(ended, self.runs, is_idle=is_idle)

    def _want_advice(self) -> None:
        """Request an explanation of the run in focus.

        Called at every tick, because a request is dropped while an earlier explanation is still being computed.
        """
        entry = self._book.entries.get(self.focus)
        if entry is None:
            self.screen.advice.want(None)
            return
        before = self._book.entries.get(entry.run.baseline or "")
        trace, is_described = entry.trace, self._describes(entry.run.job, entry.cluster)
        is_named = len(self._shown_entries()) > 1 or not is_described
        self.screen.advice.want(
            Subject(
                entry.run, trace.label, self.screen.looks.get(self.focus), len(trace.steps), entry.is_alive, is_named,
                baseline=None if before is None else before.run,
            )
        )  # fmt: skip

    def _ended(self, entry: RunEntry) -> None:
        """If the run has ended, show its error if it failed, and update the results stored in the notebook."""
        if entry.is_alive:
            return
        if entry.state == "failed":
            self.problem = self.screen.failure_of(entry) or self.problem
        self.screen.draw_summary(self._shown_entries())

    # The picture in a saved notebook.

    def _kept(self) -> list[widgets.Widget | str]:
        screen = self.screen
        live = [screen.live.overview, screen.live.overview_words]
        return [screen.status, screen.problem, *live, summary_html(self._shown_traces())]

    def _begin_showing(self) -> None:
        for part in (
            self.screen.forecast,
            self.place,
            self.screen.outcome,
            self.screen.payoff,
            self.screen.advice,
            self.screen.ghosts,
        ):
            part.begin()
        self._redraw()
