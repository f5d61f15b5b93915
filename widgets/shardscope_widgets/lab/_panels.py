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
from shardscope.spec.job_parts import label_of
from shardscope_widgets.fault_lab import FaultLab
from shardscope_widgets.kit.still import Still
from shardscope_widgets.planner import Planner
from shardscope_widgets.step_player import StepPlayer
from shardscope_widgets.training_lab import TrainingLab
from shardscope_widgets.tuning_lab import TuningLab
from shardscope_widgets.twin import Twin

RUN = "Run"


class Predicted(Still, widgets.VBox):  # type: ignore[misc]
    """The prediction of a job on this machine, and its predicted step, which plays."""

    def __init__(self, job: Job) -> None:
        prediction = predict_job(job)
        self.player = StepPlayer()
        try:
            self.player.show(step_events_of(prediction))
        except SpecError as error:
            self.player.empty = f"The step is not drawn: {error}"
        super().__init__([widgets.HTML(prediction._repr_html_()), self.player])

    def _kept(self) -> list[widgets.Widget | str]:
        return [self.children[0], *self.player._kept()]  # noqa: SLF001 - a part of this panel


def _training(job: Job, *, root: Path | None) -> TrainingLab:
    lab = TrainingLab(root=root)
    lab.fill(job)
    return lab


def _planner(job: Job) -> Planner:
    name = label_of(job.model)
    try:
        model = known_model(name)
    except SpecError:
        raise SpecError(
            f"{name} is not a transformer, and the planner splits transformers only; choose another model under {RUN}"
        ) from None
    return Planner(model, nodes=1, global_batch=job.batch.global_batch, precision=job.precision)


def makers(root: Path | None) -> dict[str, Callable[[Job], Any]]:
    """Return the function that opens the panel of each tab for a job.

    Args:
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
    """
    return {
        "Plan": _planner, "Predict": Predicted, RUN: partial(_training, root=root),
        "Compare": lambda _job: Twin(root=root), "Tune": lambda job: TuningLab(job, root=root),
        "Break": lambda _job: FaultLab(root=root),
    }  # fmt: skip


TABS = tuple(makers(None))
KEEPS_ITS_JOB = {"Plan", "Tune"}
"""Tabs whose panels have choices of their own, and take another job only when asked."""
SHOWS_A_RUN = {"Compare", "Break"}
