"""Controls of the Tuning Lab for job, search and objectives, each bound to the trait of its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import traitlets as t

from shardscope.spec import Link
from shardscope.tuning.objectives import OBJECTIVES, QUALITIES
from shardscope.tuning.samplers import SAMPLERS
from shardscope_widgets.figures._trials import ORDER
from shardscope_widgets.job_form.choices import Choices
from shardscope_widgets.job_form.controls import make_controls
from shardscope_widgets.kit.form import link
from shardscope_widgets.tuning_lab._parts import SpacePicker

JOB = ("model", "data", "strategy", "world_size", "global_batch", "steps", "bandwidth", "latency")
"""Controls of the Training Lab that also set the job here."""
BANDWIDTHS = tuple(
    f"{value} {unit}"
    for unit, values in (("Mbit/s", (10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700)),
                         ("Gbit/s", (1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100)))
    for value in values
)  # fmt: skip
LATENCIES = ("0 s", "5 us", "10 us", "20 us", "50 us", "0.1 ms", "0.2 ms", "0.5 ms", "1 ms", "2 ms", "5 ms", "10 ms",
             "20 ms", "50 ms")  # fmt: skip

DEFAULT_ACROSS = "seconds"

LINKS = tuple(Link(bandwidth=rate, latency_s=late) for rate in BANDWIDTHS for late in LATENCIES)
"""All links that the sliders can select."""


def job_controls(choices: Choices) -> dict[str, widgets.DOMWidget]:
    """Return the controls of the job, as in the Training Lab."""
    made = make_controls(choices, JOB)
    made["latency"].layout.display = "none" if choices.bandwidth == "as it is" else None
    return made


def study_controls(lab: t.HasTraits) -> dict[str, widgets.DOMWidget]:
    """Return the controls of the study: name, trials, parallel trials, sampler."""
    controls: dict[str, widgets.DOMWidget] = {
        "name": widgets.Text(description="Study", continuous_update=False),
        "trials": widgets.BoundedIntText(description="Trials", min=1, max=100_000),
        "parallel": widgets.BoundedIntText(description="At once", min=1, max=64),
        "sampler": widgets.Dropdown(description="Sampler", options=_samplers(lab)),
    }
    link(lab, controls)
    return controls


def _samplers(lab: t.HasTraits) -> list[tuple[str, Any]]:
    own = lab.trait_values()["sampler"]
    more = [] if own in SAMPLERS else [(type(own).__name__, own)]
    return [*((name, name) for name in SAMPLERS), *more]


def objectives_picker(own: Sequence[str]) -> SpacePicker:
    """Return the picker of the objectives, as buttons."""
    picker = SpacePicker(
        rows=objective_rows(own), fixed=True, state={"objectives": {"on": True, "picked": []}}
    )
    picker.add_class("ss-fixed")
    return picker


def objective_rows(own: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the row of all objectives, user-defined ones last."""
    names = [*OBJECTIVES, *own]
    return [{"name": "objectives", "label": "Minimise", "options": names, "kind": "choices", "inner": False}]


def usual_axes(objectives: Sequence[str], own: Sequence[str], now: tuple[str, str]) -> tuple[str, str]:
    """Return the x and y axes; one that the study does not minimise gives way, x only if it is a default."""
    x, y = now
    quality = next((name for name in objectives if name in (*QUALITIES, *own)), None)
    if quality is not None and y not in objectives:
        y = quality
    costs = [name for name in objectives if name != y]
    if x in {DEFAULT_ACROSS, ORDER} and x not in costs:
        x = costs[0] if costs else ORDER
    return x, y


def link_controls() -> dict[str, widgets.DOMWidget]:
    """Return the controls of the link that finished trials are re-projected onto."""
    controls: dict[str, widgets.DOMWidget] = {
        "is_relinked": widgets.Checkbox(description="Another link", indent=False),
        "on_bandwidth": widgets.SelectionSlider(description="Bandwidth", options=BANDWIDTHS),
        "on_latency": widgets.SelectionSlider(description="Latency", options=LATENCIES),
    }
    return controls


def axis_controls() -> dict[str, widgets.Dropdown]:
    """Return the controls of the axes and the colour of the front."""
    return {
        name: widgets.Dropdown(description=label, options=list(OBJECTIVES))
        for name, label in (("y", "Up"), ("x", "Across"), ("colour", "Colour"))
    }
