"""Steps that the user measured: the controls to enter them, and the calibration fitted to them."""

from __future__ import annotations

from typing import NamedTuple

import ipywidgets as widgets

from shardscope.calibration.calibration import Calibration
from shardscope.errors import SpecError
from shardscope.measure.calibrate.of_rows import calibrate_rows
from shardscope.planner import Plans, short
from shardscope.planner.explain import seconds
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer
from shardscope_widgets.kit.markup import classed, words_html

ASK = (
    "If you have run the chosen plan, enter its measured step time: predictions are then calibrated with it, and plans "
    "ranked again."
)


class MeasuredPlan(NamedTuple):
    """A measured step of a plan, with the step time that was predicted before the measurement."""

    model: Transformer
    layout: Layout
    software: str
    measured_s: float
    predicted_s: float

    @property
    def row(self) -> dict[str, object]:
        """The step as a row of `ss.calibrate`."""
        named = {"model": self.model, "software": self.software, "label": short(self.layout)}
        return {**self.layout.model_dump(), **named, "step_time_s": self.measured_s}


def measured_step(plans: Plans, rank: int, measured_s: float) -> MeasuredPlan:
    """Return the measured step of the plan at this position in the ranking.

    Raises:
        SpecError: The time is not above 0, or no plan has this rank.
    """
    if not measured_s > 0:
        raise SpecError(f"measured={measured_s:g} s is not a step time; enter the seconds of one step")
    plans.ranked(rank)
    plan = plans.row(int(plans.order[rank - 1]), rank=rank)
    return MeasuredPlan(plans.setting.model, plan.layout, plan.software, measured_s, plan.step_time_s)


def calibration_of_steps(steps: list[MeasuredPlan], cluster: Cluster) -> Calibration | None:
    """Return the calibration of a cluster fitted to these steps; None without steps."""
    return calibrate_rows([step.row for step in steps], cluster=cluster) if steps else None


class MeasuredBox:
    """A field for the time of a measured step, and the buttons that use or discard it."""

    def __init__(self) -> None:
        self.seconds = widgets.BoundedFloatText(
            description="Measured step time (s)",
            min=0,
            max=1e9,
            step=0.1,
            tooltip="Measured time of one optimizer step",
        )
        self.use = widgets.Button(description="Calibrate", icon="check")
        self.use.tooltip = "Calibrate with this step of the chosen plan, and rank all plans again"
        self.forget = widgets.Button(description="Forget", icon="undo", disabled=True)
        self.forget.tooltip = "Rank all plans without any measured step"
        self.told = widgets.HTML(words_html(ASK, is_live=True))
        row = classed(widgets.HBox([self.seconds, self.use, self.forget]), "ss-measured")
        self.box = widgets.VBox([row, self.told])

    def show(self, steps: list[MeasuredPlan], plans: Plans | None) -> None:
        """Show the measured steps in use, with their times as predicted before and after calibration."""
        self.forget.disabled = not steps
        self.told.value = words_html(" ".join(_told(step, plans) for step in steps) or ASK, is_live=True)


def _told(step: MeasuredPlan, plans: Plans | None) -> str:
    now = "" if plans is None else f", {seconds(predicted_again(step, plans))} after it"
    before = f"predicted: {seconds(step.predicted_s)} before calibration"
    return f"{short(step.layout)} took {seconds(step.measured_s)} per step; {before}{now}."


def predicted_again(step: MeasuredPlan, plans: Plans) -> float:
    """Return the step time of the measured layout with the calibration of `plans`, in seconds."""
    from shardscope.prediction.predict import predict  # only shown results need it

    calibration = plans.setting.calibration
    return predict(step.model, plans.setting.cluster, step.layout, calibration=calibration).step_time_s
