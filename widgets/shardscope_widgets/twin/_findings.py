"""The data that the Twin shows for one run: its comparison, a simulated step, and the recorded steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from shardscope.errors import ShardscopeError
from shardscope.measure.compare.comparison import Comparison
from shardscope.measure.compare.of_run import comparison_or_reason
from shardscope.measure.compare.rows import simulation_of
from shardscope.prediction.job import JobPrediction
from shardscope.runlog.recorded_step import recorded_step
from shardscope.runlog.schema import Event
from shardscope.runlog.spans import finished_steps
from shardscope.runlog.step_events import StepEvents
from shardscope.runlog.steps import WARM_UP_STEPS, step_end
from shardscope.runtime.launcher.preflight import preflight, preflight_of
from shardscope.spec.observed import ObservedJob
from shardscope_widgets.figures._ghosts import GhostPart, ghost_of

if TYPE_CHECKING:
    from shardscope.runtime import Run
    from shardscope.spec import Job

HERE, AS_RUN = "this machine", "as it ran"
"""Clusters of the prediction: this machine without emulated links, or the cluster of the run."""


@dataclass
class Findings:
    """One run, its prediction and its simulation.

    Attributes:
        run: The run.
        events: Events of the run.
        comparison: The comparison with the prediction, or a sentence that says why there is none.
        prediction: The prediction; None if the job cannot be predicted.
    """

    run: Run
    events: Sequence[Event]
    comparison: Comparison | str
    prediction: JobPrediction | None
    _recorded: dict[int, StepEvents | None] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, run: Run, where: str, job: Job | None = None) -> Findings:
        """Read a run, and compare it with its prediction for its own cluster or for this machine.

        Args:
            run: The run.
            where: The cluster of the prediction.
            job: The run's job with the user's functions, which are then called; None calls none.
        """
        if where == AS_RUN or isinstance(run.job, ObservedJob):
            prediction = None if isinstance(run.job, ObservedJob) else preflight_of(run, job).prediction
            return cls(run, run.events(), comparison_or_reason(run, job=job), prediction)
        prediction = preflight(job or run.job, calls_functions=job is not None).prediction
        return cls(run, run.events(), comparison_or_reason(run, prediction, job=job), prediction)

    @cached_property
    def steps(self) -> dict[int, float]:
        """Step time of the slowest rank, in seconds, of each step whose spans all ranks recorded, by step number."""
        return {
            number: step_end(rows).step_time_s
            for number, rows in finished_steps(self.events, self.run.job.world_size).items()
            if all(row.get("spans") for row in rows)
        }

    @cached_property
    def typical(self) -> int:
        """Number of the step whose time is the median of the steps after the warm-up; 0 if no step has spans."""
        numbers = sorted(self.steps)
        ranked = sorted(numbers[WARM_UP_STEPS:] or numbers, key=lambda number: self.steps[number])
        return ranked[len(ranked) // 2] if ranked else 0

    @cached_property
    def simulated(self) -> StepEvents | None:
        """The simulated step; None if there is none or it is too large to draw."""
        if self.prediction is None:
            return None
        found = simulation_of(self.prediction.at_step(max(self.steps, default=1)), [])
        try:
            return None if found is None else found.timeline
        except ShardscopeError:
            return None

    @cached_property
    def predicted(self) -> tuple[GhostPart, ...]:
        """Parts of the predicted step, in order; empty if there are none."""
        return () if self.prediction is None else ghost_of(self.prediction).parts

    def measured(self, step: int) -> StepEvents | None:
        """Return a recorded step; None if its spans are unknown."""
        if step not in self._recorded:
            found = recorded_step(self.run.job, self.events, self.run.name, step=step)
            self._recorded[step] = found
        return self._recorded[step]
