"""Predict the times of trials on another network link: the measured time plus the change predicted by `ss.predict`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from shardscope.errors import ShardscopeError
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.runtime.launcher.preflight import preflight
from shardscope.spec import Job, Link
from shardscope_widgets.figures._trials import TrialInfo, with_front

PENDING = "the time on this link is being computed"


class Relinker:
    """Predicts the times that a study's trials would take on other links.

    Predictions are cached, so that showing a link again is immediate.

    Args:
        job_of: Function that returns the job of a trial, given its number.
    """

    def __init__(self, job_of: Callable[[int], Job]) -> None:
        self._job_of = job_of
        self._own: dict[int, JobPrediction | str] = {}
        self._longer: dict[tuple[int, Link], float | str] = {}

    def onto(
        self, trials: Sequence[TrialInfo], objectives: Collection[str], link: Link, *, budget_s: float = 60.0
    ) -> list[TrialInfo]:
        """Return the trials with the times predicted for `link`, and with the resulting front.

        Trials that could not be predicted within `budget_s` seconds have the note `PENDING`.

        Args:
            trials: Trials with times as measured.
            objectives: Objectives of the study, for the front.
            link: The link of each rank.
            budget_s: Time after which no further trial is predicted, in seconds.
        """
        deadline = time.monotonic() + budget_s
        return with_front([self._moved(trial, link, deadline) for trial in trials], objectives)

    def _moved(self, trial: TrialInfo, link: Link, deadline: float) -> TrialInfo:
        if "seconds" not in trial.values:
            return trial
        key = trial.number, link
        if key not in self._longer and time.monotonic() < deadline:
            self._longer[key] = self._longer_s(trial.number, link)
        longer_s = self._longer.get(key, PENDING)
        rest = {name: value for name, value in trial.values.items() if name != "seconds"}
        if isinstance(longer_s, str):
            return replace(trial, values=rest, note=longer_s)
        seconds = max(0.0, trial.values["seconds"] + trial.steps * longer_s)
        return replace(trial, values={**rest, "seconds": seconds})

    def _longer_s(self, number: int, link: Link) -> float | str:
        """Return the predicted increase of the step time on a link over the job's own link, or why it is unknown."""
        if number not in self._own:
            try:
                self._own[number] = _predicted(self._job_of(number))
            except ShardscopeError as error:
                self._own[number] = str(error)
        own = self._own[number]
        if isinstance(own, str):
            return own
        there = predict_job(own.job.replace(link=link), trace=lambda _: own.found)
        assert own.step_time_s is not None
        assert there.step_time_s is not None
        return there.step_time_s - own.step_time_s


def _predicted(job: Job) -> JobPrediction | str:
    """Return the prediction of a job, or the reason why no prediction applies to all steps."""
    if not job.compression.steps_are_alike:
        return f"steps differ from one another with compression={job.compression.label!r}"
    found = preflight(job, calls_functions=True)
    if found.prediction is None:
        return found.problem or found.impossible
    return found.prediction if found.prediction.has_rates else str(found.prediction.note)


def notes_of(trials: Sequence[TrialInfo]) -> dict[str, list[int]]:
    """Return the numbers of the trials that have no predicted time, by reason."""
    found: dict[str, list[int]] = {}
    for trial in trials:
        if trial.note:
            found.setdefault(trial.note, []).append(trial.number)
    return found
