"""The controls of the Training Lab: one a choice, bound both ways to the trait of the same name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from shardscope_widgets.training_lab._choices import AS_IT_IS, NO_LATENCY, Choices, known_names
from shardscope_widgets.training_lab._families import compressor_families, strategy_families
from shardscope_widgets.training_lab._picker import Picker

_MICRO = (("as it suits", 0), *((str(n), n) for n in (1, 2, 4, 8, 16, 32, 64)))
_BANDWIDTHS = (AS_IT_IS, "10 Mbit/s", "50 Mbit/s", "100 Mbit/s", "500 Mbit/s", "1 Gbit/s", "5 Gbit/s")
_LATENCIES = (NO_LATENCY, "0.1 ms", "1 ms", "5 ms", "20 ms", "100 ms")
WHAT = ("model", "data", "strategy", "world_size")
"""What stands above the strategy's own settings."""
RATE = ("optimizer", "lr", "lr_schedule")
"""What stands above the schedule's own settings."""
WIRE = ("bandwidth", "compression")
"""What stands above the latency, which is the link's, and the compression's own settings."""


def _dropdown(
    choices: Choices, field: str, description: str, options: Sequence[Any] | None = None
) -> widgets.Dropdown:
    value = getattr(choices, field)
    known = list(options if options is not None else known_names(field))
    return widgets.Dropdown(description=description, options=_including(known, value), value=value)


def _including(options: Sequence[Any], value: Any) -> list[tuple[str, Any]]:
    """Pairs of name and value; `value` joins under its own name if it is missing: a path, a function of the
    user's.
    """
    pairs = [option if isinstance(option, tuple) else (str(option), option) for option in options]
    known = any(other == value for _, other in pairs)
    return pairs if known else [*pairs, (getattr(value, "__name__", str(value)), value)]


def make_controls(choices: Choices) -> dict[str, widgets.DOMWidget]:
    """All controls by the name of their trait, in tab order, bound to `choices`."""
    number = widgets.BoundedIntText
    controls = {
        "model": _dropdown(choices, "model", "Model"),
        "data": _dropdown(choices, "data", "Data"),
        "strategy": Picker(description="Strategy", groups=strategy_families(), value=choices.strategy),
        "world_size": number(description="Ranks", min=1, max=64, value=choices.world_size),
        "optimizer": _dropdown(choices, "optimizer", "Optimizer"),
        "lr": widgets.BoundedFloatText(
            description="Learning rate", min=0, max=1e3, step=1e-4, value=choices.lr
        ),
        "lr_schedule": _dropdown(choices, "lr_schedule", "LR schedule"),
        "global_batch": number(description="Global batch", min=1, max=1_000_000, value=choices.global_batch),
        "micro_batch": _dropdown(choices, "micro_batch", "Micro-batch", _MICRO),
        "bandwidth": _dropdown(choices, "bandwidth", "Link", _BANDWIDTHS),
        "compression": Picker(
            description="Compression", groups=compressor_families(), value=choices.compression
        ),
        "latency": _dropdown(choices, "latency", "Latency", _LATENCIES),
        "precision": _dropdown(choices, "precision", "Precision"),
        "recompute": _dropdown(choices, "recompute", "Recompute"),
        "noise_scale": widgets.Dropdown(
            description="Noise scale", options=[("off", False), ("measured", True)], value=choices.noise_scale
        ),
        "steps": number(description="Steps", min=1, max=10_000_000, value=choices.steps),
        "seed": number(description="Seed", min=0, max=2**31, value=choices.seed),
    }
    for field, control in controls.items():
        control.tooltip = Choices.class_traits()[field].help
        bind(choices, field, control)
    return controls


def bind(choices: Choices, field: str, control: widgets.DOMWidget) -> None:
    """Keep the trait and the control equal; a value that a dropdown lacks is added to its options."""

    def to_control(change: dict[str, Any]) -> None:
        if isinstance(control, widgets.Dropdown) and change["new"] != control.value:
            control.options = _including(control.options, change["new"])
        control.value = change["new"]

    choices.observe(to_control, field)
    control.observe(lambda change: setattr(choices, field, change["new"]), "value")


def panel(controls: dict[str, widgets.DOMWidget], options: dict[str, widgets.DOMWidget]) -> widgets.VBox:
    """The controls two in a row, the settings of a choice below it; `options` by the choice whose settings they are."""
    what, wire = ([controls[name] for name in names] for names in (WHAT, WIRE))
    rate = [controls[name] for name in RATE]
    how = [control for name, control in controls.items() if name not in WHAT + WIRE + RATE + ("latency",)]
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
    """A latency goes with a bandwidth only; one that was given without stays in sight, for it must be taken back."""

    def show(_change: object = None) -> None:
        needless = bandwidth.value == AS_IT_IS and latency.value == NO_LATENCY
        box.layout.display = "none" if needless else None

    bandwidth.observe(show, "value")
    latency.observe(show, "value")
    show()
