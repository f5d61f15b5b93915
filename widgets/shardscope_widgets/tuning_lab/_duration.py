"""The predicted duration of a trial, computed in a background thread, as the first prediction of a model traces it."""

from __future__ import annotations

from shardscope.runtime.launcher.preflight import preflight
from shardscope.spec import Job
from shardscope_widgets.kit.background import Background


class TrialDuration(Background):
    """Predicted seconds of the newest job's training (`seconds`); None until predicted, or if it cannot be."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._asked: Job | None = None

    def want(self, job: Job) -> None:
        """Request the prediction for a job and return at once; while another one is predicted, do nothing."""
        if job != self._asked and not self._is_busy:
            self._asked, self.seconds = job, None
            self._start(self._work, job, name="duration")

    def _work(self, job: Job) -> None:
        self.seconds = preflight(job, calls_functions=False).run_time_s
