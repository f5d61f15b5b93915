"""The small job that stands for a plan, below the button that starts it: its progress, and the cost of each axis."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import ipywidgets as widgets

from shardscope_widgets.figures._axis_costs import AXES, axis_costs_info, axis_costs_table, axis_costs_text
from shardscope_widgets.figures._rank_mesh import rank_mesh_info
from shardscope_widgets.kit.clock import Clock
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.kit.markup import classed, note_html, status_html, words_html
from shardscope_widgets.kit.mesh_panel import MeshPanel
from shardscope_widgets.kit.threads import panel_thread
from shardscope_widgets.words import duration_text, safe

if TYPE_CHECKING:
    from shardscope.planner.rehearsal import Rehearsal
    from shardscope.prediction.job import JobPrediction
    from shardscope.runlog.step_events import StepEvents
    from shardscope.runtime import Run
    from shardscope.spec.layout import Layout
    from shardscope_widgets.trace import Trace

WARM_UP = 1
"""Number of first steps that are left out of the measured costs, unless there is no other."""
ENOUGH = 2
"""Number of finished steps after which the measured costs are shown."""
_LOOK_EVERY_S = 0.5
_ALIVE = {"starting", "running"}


class Trained(NamedTuple):
    """A run that trains a plan small.

    Attributes:
        planned: Layout of the plan.
        found: The plan's rehearsal.
        prediction: The prediction of its job.
        run: The run.
        where: Sentence on where it runs; empty on the emulated cluster.
    """

    planned: Layout
    found: Rehearsal
    prediction: JobPrediction
    run: Run
    where: str = ""


class TrainedPlan:
    """The widgets, in `box`; hidden until there is something to say.

    The newest run of each plan is kept until the next search, and shown again when its plan is chosen again.

    Args:
        guard: Shows the errors of callbacks.
    """

    def __init__(self, guard: Guard) -> None:
        self.said, self.status, self.costs, self.notes = (widgets.HTML() for _ in range(4))
        self.stop = widgets.Button(description="Stop", icon="stop", tooltip="Stop the small job's run")
        self.mesh = MeshPanel()
        self._guard = guard
        self._clock = Clock(self._beat, interval_s=_LOOK_EVERY_S)
        self._run: Run | None = None
        self._newest: Run | None = None
        self._trace: Trace | None = None
        self._kept: dict[Layout, Trained] = {}
        self._shown_of: Layout | None = None
        bar = classed(widgets.HBox([self.status, self.stop]), "ss-trained-bar")
        self._of_run = widgets.VBox([bar, self.costs, self.notes, self.mesh.box])
        self.box = classed(widgets.VBox([self.said, self._of_run]), "ss-trained")
        self.stop.on_click(lambda _button: self._stop())
        self.clear()

    def clear(self) -> None:
        """Show nothing; a run that was shown continues."""
        with self._guard.lock:
            self._run = self._trace = self._shown_of = None
            self.said.value, self.status.value, self.costs.value = "", "", ""
            self._of_run.layout.display = "none"

    def forget(self) -> None:
        """Forget the runs of all plans, whose predictions a new search has replaced."""
        self._kept = {}
        self.clear()

    def show(self, planned: Layout) -> None:
        """Show the run of a plan; nothing if it was not trained."""
        if planned == self._shown_of:
            return
        if planned in self._kept:
            self.watch(self._kept[planned])
        else:
            self.clear()

    def end(self) -> None:
        """Stop the newest run if it still trains: two small jobs would slow each other down."""
        if self._newest is not None and self._newest.state in _ALIVE:
            self.say(f"Stopping {self._newest.name}, which is still training …")
            self._newest.stop()

    def say(self, text: str) -> None:
        """Show a sentence, and no run."""
        self.clear()
        self.said.value = words_html(text, is_live=True)

    def watch(self, trained: Trained) -> None:
        """Show the run of a plan, first as predicted, then as measured."""
        from shardscope_widgets.trace import Trace

        planned, found, prediction, run, where = trained
        with self._guard.lock:
            if self._kept.get(planned) is not trained:
                self._newest = run
            self._kept[planned], self._shown_of = trained, planned
            self._run, self._trace, self._tail = run, Trace.of(run), run.tail()
            self._found, self._prediction, self._planned = found, prediction, planned
            self._shown: tuple[int, str] | None = None
            self._steps: dict[int, StepEvents] = {}
            self.said.value = words_html(rehearsal_text(planned, found, prediction, run.name), is_live=True)
            differences = " ".join(filter(None, (where, *found.notes)))
            told = f"<details><summary>Differences from the plan</summary>{note_html(differences)}</details>"
            self.notes.value = told if differences else ""
            self._draw(())
            self._beat()
            self._of_run.layout.display = None
        self._clock.start()

    def close(self) -> None:
        """Stop following the run."""
        self._clock.stop()

    def _stop(self) -> None:
        if self._run is not None:
            panel_thread(self._guard.callback(self._run.stop, lock=False), name="stop").start()

    def _beat(self) -> None:
        with self._guard.run():
            if self._run is not None and self._trace is not None:
                self._update(self._run, self._trace)

    def _update(self, run: Run, trace: Trace) -> None:
        state = run.state  # read first, so that no event before the end is missed
        trace.feed(self._tail.poll())
        if (trace.last_step, state) == self._shown:
            return
        self._shown = trace.last_step, state
        is_alive = state in _ALIVE
        self.stop.disabled = not is_alive
        self.status.value = status_html(
            progress_text(trace.last_step, run, _step_s(self._found, self._prediction), state), state
        )
        steps = self._measured(run, trace)
        if steps:
            self._draw(steps)
        if not is_alive and threading.current_thread() is self._clock._thread:  # noqa: SLF001
            self._run = None

    def _measured(self, run: Run, trace: Trace) -> tuple[StepEvents, ...]:
        """Return the finished steps without the warm-up, as soon as there are enough."""
        if trace.last_step < min(ENOUGH, run.job.steps):
            return ()
        for number in range(1, trace.last_step + 1):
            if number not in self._steps and (found := run.step_events(number)) is not None:
                self._steps[number] = found
        return tuple(step for number, step in sorted(self._steps.items()) if number > WARM_UP)

    def _draw(self, steps: tuple[StepEvents, ...]) -> None:
        info = axis_costs_info(self._found, self._prediction, steps)
        here = self._found.job.layout()
        degrees = {axis: (getattr(self._planned, axis), getattr(here, axis)) for axis in AXES}
        answer = f'<div class="ss-told" role="status"><b>{safe(axis_costs_text(info))}</b></div>'
        self.costs.value = answer + axis_costs_table(info, degrees).html("ss-table")
        ranks = rank_mesh_info(self._prediction)
        self.mesh.draw(ranks, *steps)
        self.mesh.box.layout.display = None if ranks.used else "none"


def rehearsal_text(planned: Layout, found: Rehearsal, prediction: JobPrediction, name: str) -> str:
    """Return which run trains a plan, with which degrees, and what one of its steps stands for."""
    job, here = found.job, found.job.layout()
    axes = [axis for axis in AXES if getattr(planned, axis) > 1]
    degrees = " · ".join(f"{axis} {getattr(here, axis)}" for axis in axes)
    is_cut = any(getattr(here, axis) != getattr(planned, axis) for axis in axes)
    whole = " · ".join(str(getattr(planned, axis)) for axis in axes)
    cut = f" (the plan has {whole}), on {job.world_size} ranks" if is_cut else ""
    fewer = here.num_micro_batches != planned.num_micro_batches
    part = (
        f", with {here.num_micro_batches} instead of {planned.num_micro_batches:,} micro-batches"
        if fewer
        else ""
    )
    return (
        f"Run {name} trains {job.model} with {degrees}{cut}. Each of its {job.steps} steps takes about "
        f"{duration_text(_step_s(found, prediction))} and represents a step of the plan, which takes "
        f"{duration_text(found.planned_s)}{part}."
    )


def _step_s(found: Rehearsal, prediction: JobPrediction) -> float:
    """Return the predicted time of a step of the small job where it runs, which may not be its emulated cluster."""
    return prediction.step_time_s or found.step_time_s


def progress_text(step: int, run: Run, step_s: float, state: str) -> str:
    """Return how far a run is, and when it says which axis costs most."""
    if state == "failed":
        return f"{run.name} has failed. {run.error or ''}".strip()
    if state not in _ALIVE:
        return f"{run.name} has ended after step {step} of {run.job.steps}."
    if step < min(ENOUGH, run.job.steps):
        left = duration_text((ENOUGH - step) * step_s)
        now = (
            f"Step {step} of {run.job.steps} is done" if step else f"{run.job.world_size} ranks are starting"
        )
        return f"{now}; measured costs appear below about {left} {'from now' if step else 'after they have started'}."
    last = "; the model is being evaluated" if step == run.job.steps else ""
    return f"Step {step} of {run.job.steps} is done{last}."
