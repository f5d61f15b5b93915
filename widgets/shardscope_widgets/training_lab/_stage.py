"""What the step player shows: a predicted step, and below it the measured step of real ranks that run the same job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardscope.runlog.recorded_step import recorded_step
from shardscope_widgets.figures._rank_mesh import axes_info
from shardscope_widgets.training_lab import _words

if TYPE_CHECKING:
    from shardscope.runlog.step_events import StepEvents
    from shardscope_widgets.training_lab._runbook import RunEntry
    from shardscope_widgets.training_lab._screen import Screen

FOLLOW_AFTER_S = 0.8
"""Seconds from the last change of the form until the ranks are restarted with the changed job."""


class Stage:
    """The step that the player shows, and the decision when running ranks must follow a change of the form.

    Attributes:
        is_watching: Whether a run was put in focus after the form was last changed, so that it is shown.
    """

    def __init__(self, screen: Screen) -> None:
        self.is_watching = False
        self._screen = screen
        self._recorded: dict[str, StepEvents] = {}
        self._first: dict[str, StepEvents] = {}
        self._follow_at = 0.0
        self._followed = ""  # the run that a scheduled restart replaces

    def draw(self, entry: RunEntry | None, *, is_own: bool) -> None:
        """Play the predicted step, and show the measured step below it.

        Args:
            entry: The run in focus.
            is_own: Whether the form describes the job and the cluster of this run.
        """
        screen, predicted, measured, note = self._screen, self._screen.forecast.step, None, ""
        if entry is not None and (is_own or self.is_watching):
            if not is_own:
                predicted = screen.ghosts.steps.get(entry.run.id)
            measured = self._recorded_step(entry)
            predicted_s = None if predicted is None else predicted.step_time_s
            note = _words.ranks_text(entry, screen.place.why_not, predicted_s, measured)
        screen.draw_step(predicted, measured, note)
        self._draw_mesh(entry, is_own=is_own)

    def _draw_mesh(self, entry: RunEntry | None, *, is_own: bool) -> None:
        """Draw the ranks of the run in focus; those of the form's job if the run has one axis, or if the form was
        changed since and now has several.
        """
        screen, of_form = self._screen, self._screen.forecast.mesh
        is_first = is_own or self.is_watching or of_form is None
        axes = None if entry is None or not is_first else axes_info(entry.run.job, entry.trace.label)
        if entry is None or axes is None:
            screen.mesh.draw(of_form)
            return
        mesh = of_form if is_own else screen.ghosts.meshes.get(entry.run.id)
        newest = self._newest_step(entry)
        screen.mesh.draw(mesh or axes, *(() if newest is None else (newest,)))

    def _newest_step(self, entry: RunEntry) -> StepEvents | None:
        """Return the first step of a run, and the step with recorded messages as soon as it has finished."""
        found = self._recorded_step(entry)
        if found is not None or not entry.trace.steps:
            return found
        if entry.run.id not in self._first:
            first = recorded_step(entry.run.job, entry.trace.early, entry.trace.label, step=1)
            if first is None:
                return None
            self._first[entry.run.id] = first
        return self._first[entry.run.id]

    def _recorded_step(self, entry: RunEntry) -> StepEvents | None:
        found = self._recorded.get(entry.run.id) or entry.trace.step_events()
        if found is not None:
            self._recorded[entry.run.id] = found
        return found

    def form_changed(self, entry: RunEntry | None, *, is_own: bool) -> None:
        """Schedule a restart of a live run with the changed job, if “Ranks follow the form” is ticked."""
        self.is_watching = False
        self.cancel()
        if self._screen.follow.value and entry is not None and entry.is_alive and not is_own:
            self._follow_at, self._followed = time.monotonic() + FOLLOW_AFTER_S, entry.run.id

    def cancel(self) -> None:
        """Cancel a scheduled restart."""
        self._follow_at = 0.0

    def must_follow(self, entry: RunEntry | None) -> bool:
        """Return whether a scheduled restart of the run in focus is due; each restart is reported only once."""
        if not self._follow_at or time.monotonic() < self._follow_at:
            return False
        self.cancel()
        is_same = entry is not None and entry.is_alive and entry.run.id == self._followed
        return is_same and bool(self._screen.follow.value)
