"""Predicted values of the shown runs, computed once for each run in a separate thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardscope.spec import Job
from shardscope_widgets.figures._ghosts import Ghost, ghost_of
from shardscope_widgets.figures._rank_mesh import RankMeshInfo
from shardscope_widgets.kit.background import Background
from shardscope_widgets.kit.own_code import may_call
from shardscope_widgets.training_lab._forecast import mesh_of, step_of

if TYPE_CHECKING:
    from shardscope.runlog.step_events import StepEvents
    from shardscope.runtime import Run


class Ghosts(Background):
    """Predictions of the shown runs, by run id: values for the figures in `found`, events of a step in `steps`, ranks
    of jobs with several axes in `meshes`.

    Runs that cannot be predicted are omitted. Nothing is predicted before `begin` is called,
    because the lab is not displayed before that.

    Args:
        on_change: Called when a prediction has been added.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.found: dict[str, Ghost] = {}
        self.steps: dict[str, StepEvents] = {}
        self.meshes: dict[str, RankMeshInfo] = {}
        self._tried: set[str] = set()
        self._on_change = on_change
        self._begun = False

    def begin(self) -> None:
        """Start predicting; call this when the lab is displayed."""
        self._begun = True

    def want(self, runs: Sequence[Run]) -> None:
        """Request the predictions of these runs and return at once."""
        new = [run for run in runs if run.id not in self._tried]
        if new and self._begun and not self._is_busy:
            self._start(self._work, new, name="ghosts")

    def _work(self, runs: Sequence[Run]) -> None:
        from shardscope.runtime.launcher.preflight import preflight_of

        for run in runs:
            self._tried.add(run.id)
            calls = type(run.job) is Job and may_call(run.job)
            prediction = (
                preflight_of(run, run.job if calls else None).prediction if type(run.job) is Job else None
            )
            if prediction is not None:
                self.found[run.id] = ghost_of(prediction)
                if (step := step_of(prediction)) is not None:
                    self.steps[run.id] = step
                if (mesh := mesh_of(prediction)) is not None:
                    self.meshes[run.id] = mesh
                self._on_change()
