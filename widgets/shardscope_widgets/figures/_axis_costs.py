"""The cost of each axis of a plan, beside that of the small job that stands for it: predicted, and as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from shardscope.prediction.axis_waits import axis_waits, bubble_s, only_axis
from shardscope.runlog.axes import EXPERT_DATA
from shardscope.show import Table
from shardscope_widgets.figures._rank_mesh import waits_of
from shardscope_widgets.words import duration_text, listed

if TYPE_CHECKING:
    from shardscope.planner.rehearsal import Rehearsal
    from shardscope.prediction.job import JobPrediction
    from shardscope.runlog.step_events import StepEvents

AXES = ("data", "tensor", "pipeline", "context", "expert")


class AxisCosts(NamedTuple):
    """Time that a step waits along each axis, in seconds; the pipeline's includes its bubble.

    Attributes:
        seconds: Seconds by axis.
        step_s: Time of the step.
    """

    seconds: Mapping[str, float]
    step_s: float

    @property
    def ranking(self) -> list[str]:
        """The axes, the most expensive first."""
        return sorted(self.seconds, key=lambda axis: -self.seconds[axis])

    def share(self, axis: str) -> float:
        """Fraction of the step that an axis takes."""
        return self.seconds.get(axis, 0.0) / self.step_s


class AxisCostsInfo(NamedTuple):
    """Costs of the axes of a plan.

    Attributes:
        planned: As predicted for the plan.
        predicted: As predicted for the small job; None if it is not predicted.
        measured: Medians of the measured steps of the small job; None before there is one.
        num_steps: Number of measured steps.
        notes: Sentences that say where the job has fewer micro-batches or stages than the plan.
    """

    planned: AxisCosts
    predicted: AxisCosts | None
    measured: AxisCosts | None = None
    num_steps: int = 0
    notes: Sequence[str] = ()


def predicted_costs(prediction: JobPrediction) -> AxisCosts | None:
    """Return the costs of the axes of a predicted job; None if its step time is not predicted."""
    if prediction.time is None:
        return None
    found = _of_all_axes(prediction, axis_waits(prediction))
    if "pipeline" in found:
        found["pipeline"] += bubble_s(prediction)
    return AxisCosts(found, prediction.time.value)


def measured_costs(steps: Sequence[StepEvents], prediction: JobPrediction) -> AxisCosts | None:
    """Return the costs of the axes in measured steps of a job, as medians; None without steps."""
    if not steps:
        return None
    waits = [waits_of(step, only_axis(prediction)) for step in steps]
    own = {axis: median(each.get(axis, 0.0) for each in waits) for axis in {*chain(*waits)}}
    own["data"] = own.get("data", 0.0) + own.pop(EXPERT_DATA, 0.0)
    return AxisCosts(_of_all_axes(prediction, own), median(step.step_time_s for step in steps))


def _of_all_axes(prediction: JobPrediction, waits: Mapping[str, float]) -> dict[str, float]:
    """Return the waits of all axes along which the job has several ranks, or for which it waits."""
    layout = prediction.job.layout()
    return {
        axis: waits.get(axis, 0.0) for axis in AXES if getattr(layout, axis) > 1 or waits.get(axis, 0.0) > 0
    }


def axis_costs_info(
    found: Rehearsal, prediction: JobPrediction, steps: Sequence[StepEvents] = ()
) -> AxisCostsInfo:
    """Return the costs of the axes of a plan, and of the job that stands for it.

    Args:
        found: The plan's rehearsal.
        prediction: The prediction of its job.
        steps: Measured steps of the job.
    """
    planned = AxisCosts(found.planned_axes_s, found.planned_s)
    fewer = [note for note in found.notes if note.startswith("The job has ")]
    return AxisCostsInfo(
        planned, predicted_costs(prediction), measured_costs(steps, prediction), len(steps), fewer
    )


def axis_costs_text(info: AxisCostsInfo) -> str:
    """Return which axis costs most in the plan, which in the small job, and which answer is the plan's."""
    text = f"In the plan, {_most(info.planned)}."
    here = info.measured or info.predicted
    if here is None:
        return text
    origin = f"measured ({_of_steps(info)})" if info.measured else "predicted before the run"
    text += f" In the small job, {_most(here)}, as {origin}."
    if here.ranking[0] != info.planned.ranking[0]:
        why = (
            "In the small job, this machine's cores also spend time on each message, and ranks of one node exchange "
            "messages through memory, which is not slowed down as other links are."
        )
        text = " ".join((text, "For the plan, the first of the two counts.", *info.notes, why))
    return text


def _of_steps(info: AxisCostsInfo) -> str:
    return "1 step" if info.num_steps == 1 else f"median of {info.num_steps} steps"


def _most(costs: AxisCosts) -> str:
    first, *others = [f"{axis} {costs.share(axis):.1%}" for axis in costs.ranking]
    name = costs.ranking[0]
    rest = f"; {listed(others)}" if others else ""
    only = "is the only one" if not others else "costs the most time"
    return f"the {name} axis {only}: {first.removeprefix(name).strip()} of the step time{rest}"


def axis_costs_table(info: AxisCostsInfo, degrees: Mapping[str, tuple[int, int]]) -> Table:
    """Return the costs as a table.

    Args:
        info: The costs.
        degrees: Number of ranks along each axis in the plan, and in the small job.
    """
    columns = [("The plan, predicted", info.planned), ("Small job, predicted", info.predicted)]
    columns.append((f"Small job, {_of_steps(info) if info.measured else 'measured'}", info.measured))
    rows = [["step time", *(duration_text(costs.step_s) if costs else "…" for _, costs in columns)]]
    for axis in info.planned.ranking:
        there, here = degrees[axis]
        name = (
            axis
            if there == here == 1
            else f"{axis} {there}"
            if there == here
            else f"{axis} {there}, here {here}"
        )
        name += "; messages and bubble" if axis == "pipeline" else ""
        rows.append([name, *(_cell(costs, axis) for _, costs in columns)])
    return Table(["axis", *(name for name, _ in columns)], rows, has_row_heads=True)


def _cell(costs: AxisCosts | None, axis: str) -> str:
    if costs is None:
        return "…"
    if axis not in costs.seconds:
        return "left out"
    return f"{costs.share(axis):.1%}, {duration_text(costs.seconds[axis])}"
