"""The controls of the Memory Calculator: one a choice, bound both ways to the trait of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ipywidgets as widgets

from shardscope.spec.model import Transformer
from shardscope_widgets.memory_calculator import _catalogue
from shardscope_widgets.memory_calculator._choices import NAMES, Choices

_TITLES = {
    "model": "Model, or path of a config.json", "device": "Device", "framework": "Framework",
    "seq": "Sequence length",
    "data": "Data", "tensor": "Tensor", "pipeline": "Pipeline", "context": "Context", "expert": "Expert",
    "zero": "ZeRO stage", "shard": "Shard over", "micro_batch": "Micro-batch", "global_batch": "Global batch",
    "schedule": "Schedule", "virtual_stages": "Virtual stages", "recompute": "Recompute", "precision": "Precision",
    "optimizer": "Optimizer", "offload": "Offload", "flash_attention": "Flash attention",
    "sequence_parallel": "Sequence parallel",
}  # fmt: skip
_GROUPS = (
    ("", ("model", "device", "framework", "seq")),
    ("Degrees", ("data", "tensor", "pipeline", "context", "expert", "zero")),
    ("Batch and schedule", ("micro_batch", "global_batch", "schedule", "virtual_stages")),
    (
        "Savings",
        ("recompute", "offload", "precision", "optimizer", "flash_attention", "sequence_parallel", "shard"),
    ),
)
SLIDERS = ("data", "tensor", "pipeline", "context", "expert", "zero", "micro_batch", "virtual_stages")


def steps_for(field: str, model: Transformer) -> list[int]:
    """Values that a slider offers for a model: those that divide what they have to."""
    powers = [1 << power for power in range(13)]
    if field == "tensor":
        return [n for n in powers if model.heads % n == 0 and n <= 64]
    if field == "pipeline":
        return [n for n in range(1, model.layers + 1) if model.layers % n == 0]
    if field == "expert":
        experts = model.mixture.experts if model.mixture else 1
        return [n for n in range(1, experts + 1) if experts % n == 0]
    return {"zero": [0, 1, 2, 3], "virtual_stages": [1, 2, 3, 4, 6, 8, 12], "micro_batch": powers[:7],
            "context": powers[:8]}.get(field, powers)  # fmt: skip


def make_controls(choices: Choices) -> dict[str, widgets.DOMWidget]:
    """All controls by the name of their trait, in tab order, bound to `choices`."""
    controls = {field: _control(choices, field) for _, fields in _GROUPS for field in fields}
    for field, control in controls.items():
        control.tooltip = Choices.class_traits()[field].help
        _bind(choices, field, control)
    return controls


def _control(choices: Choices, field: str) -> widgets.DOMWidget:
    value, title = getattr(choices, field), _TITLES[field]
    if field == "model":
        options = _catalogue.model_names()
        return widgets.Combobox(
            description=title,
            options=options,
            value=_shown(value),
            ensure_option=False,
            continuous_update=False,
        )
    if field == "device":
        return widgets.Dropdown(description=title, options=_catalogue.device_names(), value=value)
    if field in NAMES:
        return widgets.Dropdown(description=title, options=NAMES[field], value=value)
    if field in SLIDERS:
        return widgets.SelectionSlider(
            description=title, options=_with(value, steps_for(field, choices.chosen_model())), value=value
        )
    if isinstance(value, bool):
        return widgets.Checkbox(description=title, value=value, indent=False)
    least: int = Choices.class_traits()[field].min  # type: ignore[attr-defined]  # all that remain are Int
    return widgets.BoundedIntText(description=title, min=least, max=10_000_000, value=value)


def _shown(value: Any) -> str:
    return value.name if isinstance(value, Transformer) else str(value)


def _with(value: int, options: Iterable[Any]) -> list[int]:
    return sorted({value, *options})


def _bind(choices: Choices, field: str, control: widgets.DOMWidget) -> None:
    """Keep the trait and the control equal; a slider gets a place for a value that it lacks."""

    def to_control(change: dict[str, Any]) -> None:
        value = _shown(change["new"]) if field == "model" else change["new"]
        if field in SLIDERS and value not in control.options:
            control.options = _with(change["new"], control.options)
        control.value = value

    def to_trait(change: dict[str, Any]) -> None:
        if field != "model" or change["new"] != _shown(choices.model):
            setattr(choices, field, change["new"])

    choices.observe(to_control, field)
    control.observe(to_trait, "value")


def refit(choices: Choices, controls: dict[str, widgets.DOMWidget], model: Transformer) -> None:
    """Give sliders the steps of another model, each at the nearest step to where it was."""
    for field in ("tensor", "pipeline", "expert"):
        steps, was = steps_for(field, model), getattr(choices, field)
        if was not in steps or not set(steps) <= set(controls[field].options):
            nearest = min(steps, key=lambda step, was=was: abs(step - was))  # type: ignore[misc]
            controls[field].options = steps
            controls[field].value = nearest
    controls["expert"].disabled = model.mixture is None


def panel(controls: dict[str, widgets.DOMWidget]) -> widgets.VBox:
    """The controls in groups, two in a row."""
    boxes: list[widgets.Widget] = []
    for title, fields in _GROUPS:
        if title:
            boxes.append(widgets.HTML(f'<div class="ss-heading">{title}</div>'))
        box = widgets.GridBox(_in_order(controls, fields))
        box.add_class("ss-controls")
        boxes.append(box)
    return widgets.VBox(boxes)


def _in_order(controls: dict[str, widgets.DOMWidget], fields: Sequence[str]) -> list[widgets.DOMWidget]:
    return [controls[field] for field in fields]
