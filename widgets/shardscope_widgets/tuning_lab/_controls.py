"""Controls of the Tuning Lab for job, study and objectives, each synchronised with the trait of the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from shardscope.tuning.objectives import OBJECTIVES, QUALITIES
from shardscope_widgets.figures._trials import ORDER
from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.job_form.controls import make_controls
from shardscope_widgets.tuning_lab._parts import SpacePicker

JOB = ("model", "data", "strategy", "world_size", "global_batch", "steps", "bandwidth", "latency")
"""Controls of the Training Lab that also set the job here."""
DEFAULT_ACROSS = "seconds"
STUDY = ("name", "trials", "parallel", "sampler")
SEARCH = ("baselines",)
LINK = ("is_relinked", "on_bandwidth", "on_latency")
"""Controls of the hypothetical network link for which the times of finished trials are predicted."""
AXES = ("y", "x", "colour")
"""Controls of the axes and the colour in the plot of the front."""


def job_controls(choices: JobChoices) -> dict[str, widgets.DOMWidget]:
    """Return the controls of the job, as in the Training Lab."""
    made = make_controls(choices, JOB)
    made["latency"].layout.display = "none" if choices.bandwidth == "as it is" else None
    return made


def objectives_picker(own: Sequence[str]) -> SpacePicker:
    """Return the picker of the objectives, with a button for each; `own` are the names of user-defined objectives."""
    picker = SpacePicker(
        rows=objective_rows(own), fixed=True, state={"objectives": {"on": True, "picked": []}}
    )
    picker.add_class("ss-fixed")
    return picker


def objective_rows(own: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the row of all objectives, with user-defined objectives last."""
    names = [*OBJECTIVES, *own]
    return [{"name": "objectives", "label": "Minimise", "options": names, "kind": "choices", "inner": False}]


def usual_axes(objectives: Sequence[str], own: Sequence[str], now: tuple[str, str]) -> tuple[str, str]:
    """Return the objectives for the x and y axes.

    If the study does not minimise an axis's objective, another objective takes its place; on the x-axis, only if the
    current objective is a default.

    Args:
        objectives: Objectives of the study.
        own: Names of user-defined objectives.
        now: Objectives currently on the x and y axes.
    """
    x, y = now
    quality = next((name for name in objectives if name in (*QUALITIES, *own)), None)
    if quality is not None and y not in objectives:
        y = quality
    costs = [name for name in objectives if name != y]
    if x in {DEFAULT_ACROSS, ORDER} and x not in costs:
        x = costs[0] if costs else ORDER
    return x, y
