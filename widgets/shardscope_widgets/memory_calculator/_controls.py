"""The controls of the Memory Calculator: one per choice, synchronised with the trait of the same name."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from shardscope.spec.model import Transformer
from shardscope_widgets.kit.controls import controls_for
from shardscope_widgets.kit.form import in_groups, setting_in
from shardscope_widgets.kit.markup import classed, heading
from shardscope_widgets.memory_calculator import _catalogue
from shardscope_widgets.memory_calculator._choices import MemoryChoices

_GROUPS = {
    "": ("model", "device", "framework", "seq"),
    "Parallelism": ("data", "tensor", "pipeline", "context", "expert", "zero"),
    "Batch and schedule": ("micro_batch", "virtual_stages", "global_batch", "schedule"),
    "Savings": (
        "recompute", "recompute_layers", "offload", "precision", "optimizer", "flash_attention",
        "sequence_parallel", "shard",
    ),
}  # fmt: skip
"""Names of the controls under each heading; controls of any other fields of a layout are added to the last group."""
SLIDERS = ("data", "tensor", "pipeline", "context", "expert", "zero", "micro_batch", "virtual_stages")


def steps_for(field: str, model: Transformer) -> list[int]:
    """Return the values that a slider offers: divisors of the number of heads, layers or experts, or a fixed list."""
    powers = [1 << power for power in range(13)]
    if field == "tensor":
        return [n for n in powers if model.heads % n == 0 and n <= 64]
    if field == "pipeline":
        return [n for n in range(1, model.layers + 1) if model.layers % n == 0]
    if field == "expert":
        experts = model.mixture.experts if model.mixture else 1
        return [n for n in range(1, experts + 1) if experts % n == 0]
    return {"virtual_stages": [1, 2, 3, 4, 6, 8, 12], "micro_batch": powers[:7],
            "context": powers[:8]}.get(field, powers)  # fmt: skip


def make_controls(choices: MemoryChoices) -> dict[str, widgets.DOMWidget]:
    """Return all controls by trait name, in tab order, synchronised with `choices`."""
    model = widgets.Combobox(
        description="Model, or path to a config.json",
        options=_catalogue.model_names(),
        ensure_option=False,
        continuous_update=False,
    )
    names = [
        name
        for group in in_groups(MemoryChoices, list(_GROUPS.values()))
        for name in group
        if name != "model"
    ]
    controls = controls_for(choices, names, **{name: _slider(choices, name) for name in SLIDERS})
    _bind_model(choices, model)
    return {"model": model} | controls


def _slider(choices: MemoryChoices, field: str) -> widgets.SelectionSlider:
    setting = setting_in(MemoryChoices, field)
    steps = [step for _, step in setting.values] or steps_for(field, choices.chosen_model())
    return widgets.SelectionSlider(description=setting.label, options=steps)


def _bind_model(choices: MemoryChoices, box: widgets.Combobox) -> None:
    """Synchronise the model box with its trait; a `Transformer` object is shown by its name."""

    def name() -> str:
        return choices.model.name if isinstance(choices.model, Transformer) else str(choices.model)

    def to_trait(change: dict[str, Any]) -> None:
        if change["new"] != name():
            choices.model = change["new"]

    box.value, box.tooltip = name(), MemoryChoices.class_traits()["model"].help
    choices.observe(lambda _change: setattr(box, "value", name()), "model")
    box.observe(to_trait, "value")


def refit(choices: MemoryChoices, controls: dict[str, widgets.DOMWidget], model: Transformer) -> None:
    """Update the sliders for another model, and move each slider to the offered value nearest to its previous value."""
    for field in ("tensor", "pipeline", "expert"):
        steps, was = steps_for(field, model), getattr(choices, field)
        if was not in steps or not set(steps) <= set(controls[field].options):
            nearest = min(steps, key=lambda step, was=was: abs(step - was))  # type: ignore[misc]
            controls[field].options = steps
            controls[field].value = nearest
    controls["expert"].disabled = model.mixture is None


def panel(controls: dict[str, widgets.DOMWidget]) -> widgets.VBox:
    """Lay out the controls in groups."""
    boxes: list[widgets.Widget] = []
    for title, fields in zip(_GROUPS, in_groups(MemoryChoices, list(_GROUPS.values())), strict=True):
        if title:
            boxes.append(heading(title))
        boxes.append(classed(widgets.GridBox([controls[field] for field in fields]), "ss-controls"))
    return widgets.VBox(boxes)
