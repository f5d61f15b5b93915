"""The controls of the Training Lab: one per choice, synchronised with the trait of the same name."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from shardscope_widgets.job_form.choices import AS_IT_IS, NO_LATENCY, JobChoices
from shardscope_widgets.job_form.families import compressor_families, strategy_families
from shardscope_widgets.job_form.picker import Picker
from shardscope_widgets.kit.controls import controls_for
from shardscope_widgets.kit.form import in_groups, setting_in

_FAMILIES = {"strategy": strategy_families, "compression": compressor_families}
WHAT = ("model", "data", "strategy", "world_size")
"""Controls above the strategy's settings."""
RATE = ("optimizer", "lr", "lr_schedule")
"""Controls above the schedule's settings."""
WIRE = ("bandwidth", "compression")
"""Controls above the link's latency and the compression's settings."""
HOW = ("global_batch", "micro_batch", "precision", "recompute", "noise_scale", "steps", "seed")
"""Controls below all of these, followed by those of any other fields of a job."""


def make_controls(choices: JobChoices, names: Sequence[str] = ()) -> dict[str, widgets.DOMWidget]:
    """Return controls bound to `choices`, by trait name.

    Args:
        choices: The traits.
        names: Traits that get a control, in this order; by default all that `panel` lays out.
    """
    names = names or [name for group in _groups() for name in group]
    pickers = {
        name: Picker(description=setting_in(JobChoices, name).label, groups=families())
        for name, families in _FAMILIES.items()
        if name in names
    }
    return controls_for(choices, names, **pickers)


def _groups() -> list[list[str]]:
    return in_groups(JobChoices, [WHAT, RATE, WIRE, ["latency"], HOW])


def panel(controls: dict[str, widgets.DOMWidget], options: dict[str, widgets.DOMWidget]) -> widgets.VBox:
    """Lay out the controls two per row, with the options of each method below the control that selects it.

    Args:
        controls: Controls by trait name.
        options: Boxes with the options of the selected method, by field.
    """
    what, rate, wire, latency, how = (
        widgets.GridBox([controls[name] for name in names]) for names in _groups()
    )
    latency.add_class("ss-options")
    _shown_with_a_link(latency, controls["bandwidth"], controls["latency"])
    boxes = [
        what,
        options["strategy"],
        wire,
        latency,
        options["compression"],
        rate,
        options["lr_schedule"],
        how,
    ]
    for box in boxes:
        box.add_class("ss-controls")
    return widgets.VBox(boxes)


def _shown_with_a_link(box: widgets.GridBox, bandwidth: widgets.Dropdown, latency: widgets.Dropdown) -> None:
    """Show the latency only if a bandwidth is chosen, or if it is set without one and has to be reset."""

    def show(_change: object = None) -> None:
        needless = bandwidth.value == AS_IT_IS and latency.value == NO_LATENCY
        box.layout.display = "none" if needless else None

    bandwidth.observe(show, "value")
    latency.observe(show, "value")
    show()
