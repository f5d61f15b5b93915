"""The prediction for the job that the controls describe, computed in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import ipywidgets as widgets

from shardscope.errors import SpecError
from shardscope_widgets.figures._rank_mesh import RankMeshInfo, rank_mesh_info
from shardscope_widgets.kit.background import Background
from shardscope_widgets.kit.markup import classed
from shardscope_widgets.kit.own_code import allow, may_call, predict_button
from shardscope_widgets.training_lab._forecast_words import forecast_text
from shardscope_widgets.training_lab._zero import ZeroStages, predicted_stages
from shardscope_widgets.words import safe

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction
    from shardscope.runlog.step_events import StepEvents
    from shardscope.runtime.launcher.preflight import Preflight
    from shardscope.spec import Job
    from shardscope.spec.cluster import EmulatedCluster

PAUSE_S = 0.2
"""Seconds to wait after the last change of a control before predicting."""


class ForecastRequest(NamedTuple):
    """A job to predict, and the emulated cluster that it runs on; None if it runs on this machine."""

    job: Job
    cluster: EmulatedCluster | None


class Forecast(Background):
    """“What will happen”: the prediction for the newest job in two sentences, which expands to show all terms.

    If the job is predicted not to fit in memory, a checkbox allows the user to start it anyway. The user's functions
    are called only after the user has pressed a button that allows it. Nothing is predicted before `begin` is called,
    because the lab is not displayed before that.

    Args:
        on_found: Called when `step` and `mesh`, the predicted step and the ranks of the newest job, have changed.
    """

    def __init__(self, on_found: Callable[[], None]) -> None:
        self.step: StepEvents | None = None
        self.mesh: RankMeshInfo | None = None
        self._on_found = on_found
        self.line = widgets.HTML()
        self.anyway = widgets.Checkbox(description="Start it anyway", indent=False)
        self.anyway.layout.display = "none"
        self.call = predict_button()
        self.call.on_click(self._allow)
        self.zero = ZeroStages()
        self.box = classed(widgets.VBox([self.line, self.call, self.anyway, self.zero.box]), "ss-forecast")
        self.found: Preflight | None = None
        self._asked: ForecastRequest | None = None
        self._begun = False
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._is_working = False

    def _allow(self, _button: object) -> None:
        self.call.layout.display = "none"
        self.line.value = _said("Tracing one step of your model …")
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            allow(asked.job)
        self.want(*(asked or ()))

    def retry(self) -> None:
        """Predict the newest job if the user has allowed its functions in another panel in the meantime."""
        if self.call.layout.display is None and self._asked is not None and may_call(self._asked.job):
            self._allow(self.call)

    def begin(self) -> None:
        """Start predicting; call this when the lab is displayed."""
        self._begun = True
        self.want(*(self._asked or ()))

    def want(self, job: Job | None = None, cluster: EmulatedCluster | None = None) -> None:
        """Request a prediction for a job and return at once.

        Args:
            job: The job; None clears the last prediction.
            cluster: The emulated cluster that the job runs on; None if it runs on this machine.
        """
        asked = None if job is None else ForecastRequest(job, cluster)
        if self._begun and asked == self._asked and (asked is None or self.found is not None):
            return
        self.zero.box.add_class("ss-outdated")
        with self._lock:
            self._asked, self.found = asked, None
            self._changed.set()
            if self._begun and asked is not None:
                self._predict()
        self.anyway.value = False
        if asked is None:
            self.step = self.mesh = None
            self.line.value = ""
            self.zero.draw("", [])
            self.anyway.layout.display = self.call.layout.display = "none"

    def _predict(self) -> None:
        """Start a thread for the newest request, unless a running thread will still read it."""
        if not (self._is_working and self._is_busy):
            self._is_working = True
            self._start(self._work, name="forecast")

    def _work(self) -> None:
        from shardscope.runtime.launcher.preflight import preflight

        while (asked := self._next()) is not None:
            self._changed.clear()
            if asked is not self._asked or self._changed.wait(PAUSE_S):
                continue
            found = preflight(*asked, calls_functions=may_call(asked.job))
            with self._lock:
                is_newest = asked is self._asked
                if is_newest:
                    self.step, self.mesh = step_of(found.prediction), mesh_of(found.prediction)
                    self._show(found, asked.job)
            if is_newest:
                self._on_found()
                self._show_stages(*asked, found.prediction)

    def _show_stages(
        self, job: Job, cluster: EmulatedCluster | None, prediction: JobPrediction | None
    ) -> None:
        """Show the memory of the newest job under each ZeRO stage, unless a newer job is requested in the meantime."""
        from shardscope.runtime.launcher.preflight import preflight

        calls = may_call(job)
        stages = (
            []
            if prediction is None
            else predicted_stages(
                prediction,
                lambda other: (
                    None
                    if self._changed.is_set()
                    else preflight(other, cluster, calls_functions=calls).prediction
                ),
            )
        )
        with self._lock:
            if self._asked == ForecastRequest(job, cluster):
                self.zero.draw(job.strategy.label, stages)

    def _next(self) -> ForecastRequest | None:
        """Return the next request. If there is none, return None: the thread then ends, and `want` must start a new
        one.
        """
        with self._lock:
            asked = self._asked if self.found is None else None
            self._is_working = asked is not None
            return asked

    def _show(self, found: Preflight, job: Job) -> None:
        self.found = found
        self.call.layout.display = "none" if may_call(job) else None
        refused = found.refusal is not None
        text = found.refusal or forecast_text(found)
        if "=" not in text.split()[0]:  # the name of a field stays as it is
            text = f"{text[0].upper()}{text[1:]}"
        inside = "" if found.prediction is None else found.prediction._repr_html_()
        all_terms = (
            f"<details><summary>All terms of the prediction</summary>{inside}</details>" if inside else ""
        )
        self.line.value = _said(text, all_terms, is_bad=refused)
        self.anyway.layout.display = None if refused else "none"


def step_of(prediction: JobPrediction | None) -> StepEvents | None:
    """Return the predicted step, event by event; None if its events cannot be listed."""
    from shardscope.simulator import step_events_of

    try:
        return None if prediction is None else step_events_of(prediction)
    except SpecError:
        return None


def mesh_of(prediction: JobPrediction | None) -> RankMeshInfo | None:
    """Return the ranks of a job with several axes; None if its ranks have one axis."""
    has_axes = prediction is not None and prediction.job.strategy.shape(prediction.job.world_size)
    return rank_mesh_info(prediction) if prediction is not None and has_axes else None


def _said(text: str, more: str = "", *, is_bad: bool = False) -> str:
    """Return the line as HTML; `more` must already be safe."""
    said = f'<b>What will happen</b> <span role="status">{safe(text)}</span>{more}'
    return f'<div class="ss-what{" bad" if is_bad else ""}">{said}</div>'
