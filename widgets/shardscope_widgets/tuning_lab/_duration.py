"""The predicted duration of a trial, computed in a background thread, because the first prediction of a model traces
the model.
"""

from __future__ import annotations

from shardscope.runtime.launcher.preflight import preflight
from shardscope.spec import Job
from shardscope_widgets.kit.background import Background


class TrialDuration(Background):
    """Predicted training time of the newest job, in seconds (`seconds`); None before it is known, or if it cannot be
    predicted.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._asked: Job | None = None

    def want(self, job: Job) -> None:
        """Request the prediction for a job and return at once; do nothing while another job is being predicted."""
        if job != self._asked and not self._is_busy:
            self._asked, self.seconds = job, None
            self._start(self._work, job, name="duration")

    def _work(self, job: Job) -> None:
        self.seconds = preflight(job, calls_functions=False).run_time_s
