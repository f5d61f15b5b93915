"""The controls of the Training Lab: one per choice, bound both ways to the trait of the same name."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from shardscope_widgets.job_form.choices import AS_IT_IS, NO_LATENCY, Choices
from shardscope_widgets.job_form.families import compressor_families, strategy_families
from shardscope_widgets.job_form.picker import Picker
from shardscope_widgets.kit.form import bind, control_of, setting_in

_FAMILIES = {"strategy": strategy_families, "compression": compressor_families}
_BANDWIDTHS = (AS_IT_IS, "10 Mbit/s", "50 Mbit/s", "100 Mbit/s", "500 Mbit/s", "1 Gbit/s", "5 Gbit/s")
_LATENCIES = (NO_LATENCY, "0.1 ms", "1 ms", "5 ms", "20 ms", "100 ms")
WHAT = ("model", "data", "strategy", "world_size")
"""Controls above the strategy's settings."""
RATE = ("optimizer", "lr", "lr_schedule")
"""Controls above the schedule's settings."""
WIRE = ("bandwidth", "compression")
"""Controls above the link's latency and the compression's settings."""
HOW = ("global_batch", "micro_batch", "precision", "recompute", "noise_scale", "steps", "seed")
CONTROLS = (*WHAT, *RATE, *WIRE, "latency", *HOW)


def make_controls(choices: Choices, names: Sequence[str] = CONTROLS) -> dict[str, widgets.DOMWidget]:
    """The controls of these traits, in this order, bound to `choices`."""
    controls = {name: _control(name) for name in names}
    bind(choices, controls)
    return controls


def _control(name: str) -> widgets.DOMWidget:
    if name == "bandwidth":
        return widgets.Dropdown(description="Link", options=_BANDWIDTHS)
    if name == "latency":
        return widgets.Dropdown(description="Latency", options=_LATENCIES)
    setting = setting_in(Choices, name)
    if name in _FAMILIES:
        return Picker(description=setting.label, groups=_FAMILIES[name]())
    return control_of(setting)


def panel(controls: dict[str, widgets.DOMWidget], options: dict[str, widgets.DOMWidget]) -> widgets.VBox:
    """Lay out the controls two per row, with a method's settings (`options`, by kind of method) below its choice."""
    what, wire, rate, how = ([controls[name] for name in names] for names in (WHAT, WIRE, RATE, HOW))
    latency = widgets.GridBox([controls["latency"]])
    latency.add_class("ss-options")
    _shown_with_a_link(latency, controls["bandwidth"], controls["latency"])
    boxes = [
        widgets.GridBox(what),
        options["strategy"],
        widgets.GridBox(wire),
        latency,
        options["compression"],
        widgets.GridBox(rate),
        options["lr_schedule"],
        widgets.GridBox(how),
    ]
    for box in boxes:
        box.add_class("ss-controls")
    return widgets.VBox(boxes)


def _shown_with_a_link(box: widgets.GridBox, bandwidth: widgets.Dropdown, latency: widgets.Dropdown) -> None:
    """Show the latency only with a bandwidth, or while it is set without one and so has to be reset."""

    def show(_change: object = None) -> None:
        needless = bandwidth.value == AS_IT_IS and latency.value == NO_LATENCY
        box.layout.display = "none" if needless else None

    bandwidth.observe(show, "value")
    latency.observe(show, "value")
    show()
