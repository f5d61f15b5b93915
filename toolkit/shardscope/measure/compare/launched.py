"""What was predicted at the launch of a run, in its comparison: a finished run's prediction does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isclose

from shardscope.calibration.saved_calibration import chosen
from shardscope.measure.compare.comparison import ComparedTerm
from shardscope.measure.compare.measured import Steps
from shardscope.measure.compare.parts import time_rows
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.observed import ObservedPrediction
from shardscope.runtime import Run
from shardscope.runtime.launcher.preflight import constants_of
from shardscope.runtime.record.launch_prediction import BUSY, LaunchConstants, LaunchPrediction

_SAME = 1e-3
"""Relative difference up to which a step time that is predicted again is the recorded one."""


@dataclass(frozen=True)
class Launched:
    """The recorded prediction of a run; None if there is none."""

    run: Run
    prediction: LaunchPrediction | None
    constants: LaunchConstants | None = None
    """Constants with which the run is predicted; None for the current ones."""

    @classmethod
    def of(cls, run: Run) -> Launched:
        """Read what was predicted at the launch of a run."""
        return cls(run, run.predicted, constants_of(run))

    @property
    def is_outdated(self) -> bool:
        """Whether current predictions use other constants than the recorded ones, as after `ss.calibrate`."""
        known = self.constants
        return known is not None and known.calibration != chosen(self.run.cluster).calibration

    @property
    def conditions(self) -> str:
        """With which constants the run was predicted, and how busy the machine was; empty without a prediction."""
        return "" if self.prediction is None else self.prediction.conditions(self.run.job.world_size)

    @property
    def reason(self) -> str:
        """Why steps took longer than predicted, if other programs kept the machine busy; else empty."""
        is_busy = self.prediction is not None and self.prediction.busy_load(self.run.job.world_size)
        return BUSY if is_busy else ""

    def told(
        self,
        times: Sequence[ComparedTerm],
        prediction: JobPrediction,
        newer: JobPrediction | ObservedPrediction | None,
        steps: Steps,
        notes: list[str],
        *,
        per: str,
    ) -> list[ComparedTerm]:
        """Return the rows of times with the recorded step time, and with newer predictions; add to `notes`.

        Args:
            times: Rows of `prediction`.
            prediction: The prediction with the recorded constants, if there are any.
            newer: A prediction with newer constants; None for none.
            steps: The finished steps of the run.
            notes: Sentences about the comparison.
            per: Name of the whole step's row.
        """
        if self.prediction is None and self.constants is None:
            notes.append("No prediction was recorded when this run was launched, so it is predicted now.")
            return list(times)
        again_s = prediction.step_time_s
        rows = [self._recorded(row, again_s, notes) if row.term == per else row for row in times]
        if not isinstance(newer, JobPrediction) or newer.host is None:
            return rows
        notes.append(f"Predicted now: with constants of {newer.host.label}.")
        found = {row.term: row.predicted for row in time_rows(newer, steps, [])}
        return [replace(row, now=found.get(row.term)) for row in rows]

    def _recorded(self, row: ComparedTerm, again_s: float | None, notes: list[str]) -> ComparedTerm:
        """Return the row of the whole step with the recorded time, unless the row is of other steps than that.

        Args:
            row: The row.
            again_s: Time of the step that was recorded, as it is predicted again; None if it is not.
            notes: Sentences about the comparison.
        """
        known = self.prediction
        was_resized = self.run.job.elastic is not None and bool(self.run.reduced().resizes)
        if (
            known is None
            or was_resized
            or again_s is None
            or not isclose(row.predicted, again_s, rel_tol=_SAME)
        ):
            return row
        if isclose(again_s, known.step_time_s, rel_tol=_SAME):
            return row
        notes.append(
            "The step time is the recorded one; its parts are predicted now, and do not add up to it."
        )
        return replace(row, predicted=known.step_time_s, interval=known.interval)
