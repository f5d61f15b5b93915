"""What each tab of the Lab shows: an existing panel, opened with the job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from shardscope.errors import SpecError
from shardscope.planner import known_model
from shardscope.prediction.job import predict_job
from shardscope.simulator import step_events_of
from shardscope.spec import Job
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.job_parts import label_of
from shardscope_widgets.fault_lab import FaultLab
from shardscope_widgets.kit.own_code import may_call
from shardscope_widgets.kit.still import Still
from shardscope_widgets.planner import Planner
from shardscope_widgets.step_player import StepPlayer
from shardscope_widgets.training_lab import TrainingLab
from shardscope_widgets.tuning_lab import TuningLab
from shardscope_widgets.twin import Twin

TABS = PLAN, PREDICT, RUN, COMPARE, TUNE, BREAK = "Plan", "Predict", "Run", "Compare", "Tune", "Break"
KEEPS_ITS_JOB = {PLAN, TUNE}
"""Tabs whose panels have settings of their own, and load another job only on request."""
SHOWS_A_RUN = {COMPARE, BREAK}

Where = EmulatedCluster | None
"""The cluster that a job runs on; None for this machine."""


class Predicted(Still, widgets.VBox):  # type: ignore[misc]
    """The prediction of a job on its cluster, and an animation of its predicted step."""

    def __init__(self, job: Job, cluster: Where) -> None:
        if not may_call(job):
            raise SpecError(
                f"the job has functions of your own, which this tab does not call; press Predict it under {RUN}"
            )
        prediction = predict_job(job, cluster)
        self.player = StepPlayer()
        try:
            self.player.show(step_events_of(prediction))
        except SpecError as error:
            self.player.empty = f"The step cannot be drawn: {error}"
        super().__init__([widgets.HTML(prediction._repr_html_()), self.player])

    def _kept(self) -> list[widgets.Widget | str]:
        return [self.children[0], *self.player._kept()]  # noqa: SLF001 - a part of this panel


def _training(job: Job, cluster: Where, *, root: Path | None, is_given: bool) -> TrainingLab:
    lab = TrainingLab(root=root)
    lab.fill(job, cluster)
    if is_given:
        lab.clear()
    return lab


def _planner(job: Job, _cluster: Where) -> Planner:
    name = label_of(job.model)
    try:
        model = known_model(name)
    except SpecError:
        raise SpecError(
            f"{name} is not a transformer, and the planner supports only transformers; choose another model under {RUN}"
        ) from None
    return Planner(model, nodes=1, global_batch=job.batch.global_batch, precision=job.precision)


def makers(root: Path | None, *, is_given: bool) -> dict[str, Callable[[Job, Where], Any]]:
    """Return the function that opens the panel of each tab for a job and its cluster.

    Args:
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        is_given: Whether the user gave the job: its prediction is then shown, and no earlier run.
    """
    return {
        PLAN: _planner, PREDICT: Predicted, RUN: partial(_training, root=root, is_given=is_given),
        COMPARE: lambda *_job: Twin(root=root), TUNE: lambda job, _cluster: TuningLab(job, root=root),
        BREAK: lambda *_job: FaultLab(root=root),
    }  # fmt: skip
