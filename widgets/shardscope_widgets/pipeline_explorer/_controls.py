"""The controls of the Pipeline Explorer: one per choice, bound both ways to the trait of the same name."""

from __future__ import annotations

import ipywidgets as widgets
import traitlets as t

from shardscope.spec.pipeline_schedule import schedules
from shardscope_widgets.kit.form import link

MOST_RANKS, MOST_MICROBATCHES = 16, 64


def make_controls(choices: t.HasTraits) -> dict[str, widgets.DOMWidget]:
    """All controls by the name of their trait, in tab order, bound to `choices`."""
    number, time = widgets.IntSlider, widgets.FloatSlider
    fine = {"step": 0.5, "readout_format": ".1f"}
    controls: dict[str, widgets.DOMWidget] = {
        "schedule": widgets.Dropdown(
            description="Schedule",
            options=[(schedule.heading(), schedule.name) for schedule in schedules()],
        ),
        "stages": number(description="Ranks", min=1, max=MOST_RANKS),
        "microbatches": number(description="Micro-batches", min=1, max=MOST_MICROBATCHES),
        "virtual_stages": number(description="Stages a rank", min=1, max=4),
        "t_f": time(description="Forward, ms", min=0.5, max=30, **fine),
        "t_input": time(description="Backward for inputs, ms", min=0.5, max=30, **fine),
        "t_weight": time(description="Backward for weights, ms", min=0.5, max=30, **fine),
        "send": time(
            description="Sending to the next rank, ms", min=0, max=10, step=0.1, readout_format=".1f"
        ),
        "last_stage": time(
            description="Last stage, times as long", min=0.5, max=3, step=0.05, readout_format=".2f"
        ),
        "freed_by_input": time(
            description="Freed by backward for inputs", min=0, max=1, step=0.05, readout_format=".0%"
        ),
    }
    link(choices, controls)
    return controls


def panel(controls: dict[str, widgets.DOMWidget], idea: widgets.HTML) -> widgets.VBox:
    """The controls stacked vertically, in groups with a heading."""
    groups = {
        "Pipeline": ("stages", "microbatches", "virtual_stages"),
        "One micro-batch on one whole rank": ("t_f", "t_input", "t_weight"),
        "What textbooks leave out": ("send", "last_stage", "freed_by_input"),
    }
    rows: list[widgets.DOMWidget] = [controls["schedule"], idea]
    for heading, names in groups.items():
        rows.append(widgets.HTML(f'<div class="ss-group">{heading}</div>'))
        rows += [controls[name] for name in names]
    box = widgets.VBox(rows)
    box.add_class("ss-left")
    return box
