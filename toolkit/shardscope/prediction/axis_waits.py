"""The time that a predicted step waits for messages along each axis of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.runlog.axes import EXPERT_DATA, axis_of

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction


def only_axis(found: JobPrediction) -> str:
    """Return the axis of a job whose collectives do not name theirs, because its ranks have one axis."""
    return "data" if found.job.strategy.pipeline_step(found.step) is None else "pipeline"


def bubble_s(found: JobPrediction) -> float:
    """Return the seconds of a step for which ranks wait in a pipeline's bubble; 0 if the step time is not predicted."""
    idle = [] if found.time is None else [term for term in found.time.parts if term.name == "idle"]
    return sum(part.value for term in idle for part in term.parts if part.name == "pipeline bubble")


def axis_waits(found: JobPrediction) -> dict[str, float]:
    """Return the seconds by axis, without the bubble of a pipeline; empty if the step time is not predicted.

    Data ranks that hold the same experts count as data ranks.
    """
    waits: dict[str, float] = {}
    for term in () if found.time is None else found.time.parts:
        for part in term.parts if term.name == "communication" else ():
            axis = (axis_of(part.name) or only_axis(found)).replace(EXPERT_DATA, "data")
            waits[axis] = waits.get(axis, 0.0) + part.value
    return waits
