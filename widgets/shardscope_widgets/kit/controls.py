"""Controls of forms, generated from the settings of a form's traits and synchronised with these traits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor, log10
from typing import Any

import ipywidgets as widgets
import traitlets as t

from shardscope.errors import SpecError
from shardscope_widgets.kit.form import OFF, UNSET, Setting, names_in, setting_in
from shardscope_widgets.kit.markup import classed, note_html

MOST = 2**53 - 1
"""Largest number that can be entered; JavaScript represents all integers up to this one exactly."""
_BOUNDED = (widgets.BoundedIntText, widgets.BoundedFloatText, widgets.IntSlider, widgets.FloatSlider)


class Open(widgets.Text):  # type: ignore[misc]
    """A text box that may be empty, which means `unset`: None, or a number that represents the default."""

    def __init__(self, *, unset: int | None = None, **settings: Any) -> None:
        super().__init__(continuous_update=False, **{"placeholder": UNSET, **settings})
        self.unset = unset


def control_of(setting: Setting) -> widgets.DOMWidget:
    """Return a control for a setting, which shows the setting's default."""
    about: dict[str, Any] = {"description": setting.label, "tooltip": setting.help}
    if setting.optional or setting.blank:
        return _open(setting, about)
    about["value"] = setting.default
    if setting.values:
        return _one_of(setting, about)
    if setting.kind == "switch":
        return widgets.Checkbox(indent=False, **about)
    if setting.kind in {"count", "number"}:
        return _number(setting, about)
    return widgets.Text(continuous_update=False, **about)


def _one_of(setting: Setting, about: dict[str, Any]) -> widgets.DOMWidget:
    if setting.kind == "combo":
        return widgets.Combobox(
            options=[text for text, _ in setting.values], continuous_update=False, **about
        )
    if setting.slider:
        return widgets.SelectionSlider(options=[value for _, value in setting.values], **about)
    return widgets.Dropdown(options=setting.values, **about)


def _open(setting: Setting, about: dict[str, Any]) -> Open:
    if setting.blank:
        return Open(unset=0, placeholder=setting.blank, **about)
    if setting.default is not None:
        about |= {"value": str(setting.default), "placeholder": OFF}
    return Open(**about)


def _number(setting: Setting, about: dict[str, Any]) -> widgets.DOMWidget:
    about["min"] = -MOST if setting.least is None else setting.least
    about["max"] = min(most for most in (setting.most, setting.reach, MOST) if most is not None)
    if setting.slider:
        kind = widgets.IntSlider if setting.kind == "count" else widgets.FloatSlider
        return kind(step=setting.step or 1, readout_format=setting.slider, **about)
    if setting.kind == "count":
        return widgets.BoundedIntText(**about)
    step = 10.0 ** (floor(log10(abs(setting.default))) - 1) if setting.default else 0.001
    return widgets.BoundedFloatText(step=setting.step or step, **about)


def field(control: widgets.DOMWidget) -> widgets.VBox:
    """Return a control with its tooltip as a line of help below it."""
    about = widgets.HTML(note_html(control.tooltip))
    return classed(widgets.VBox([control, about]), "ss-field")


def controls_for(
    choices: t.HasTraits, names: Iterable[str] = (), **made: widgets.DOMWidget
) -> dict[str, widgets.DOMWidget]:
    """Return the controls for traits of `choices`, synchronised with them, by trait name.

    Args:
        choices: Object whose traits were created by `trait_of` and `own_trait`.
        names: Traits that get a control, in tab order; by default, all traits.
        made: Controls to use instead of generated ones, by trait name.
    """
    kind = type(choices)
    names = list(names) or names_in(kind)
    controls = {name: made.get(name) or control_of(setting_in(kind, name)) for name in names}
    bind(choices, controls)
    return controls


def show(control: widgets.DOMWidget, value: Any) -> None:
    """Make a control show a value.

    A value outside the control's options or bounds, such as a user-defined function, is added to them first.
    """
    if isinstance(control, Open):
        value = "" if value in {None, control.unset} else str(value)
    elif isinstance(control, widgets.Combobox):
        value = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    elif isinstance(control, widgets.SelectionSlider):
        if value not in control.options:
            more = [*control.options, value]
            control.options = more if isinstance(value, str) else sorted(more)
    elif isinstance(control, widgets.Dropdown):
        pairs = [each if isinstance(each, tuple) else (str(each), each) for each in control.options]
        if not any(known == value for _, known in pairs):
            own = value if isinstance(value, (str, int, float, tuple)) else type(value).__name__
            control.options = [*pairs, (str(getattr(value, "__name__", own)), value)]
    elif isinstance(control, _BOUNDED):
        control.max = max(control.max, min(value, MOST))
    control.value = value


def typed(control: widgets.DOMWidget) -> Any:
    """Return the value that a control shows; `unset` for an empty `Open` box."""
    if not isinstance(control, Open):
        return control.value
    text = control.value.strip()
    if not text:
        return control.unset
    return int(text) if control.unset is not None and text.isdecimal() else text


def bind(choices: t.HasTraits, controls: Mapping[str, widgets.DOMWidget]) -> None:
    """Synchronise each control with the trait of the same name; input that the trait rejects is undone."""
    for name, control in controls.items():
        control.tooltip = choices.traits()[name].help
        _bind(choices, name, control)


def _bind(choices: t.HasTraits, name: str, control: widgets.DOMWidget) -> None:
    def to_control(_change: object = None) -> None:
        control.unobserve(to_trait, "value")  # a list whose options change briefly selects the first option
        show(control, getattr(choices, name))
        control.observe(to_trait, "value")

    def to_trait(_change: object) -> None:
        try:
            setattr(choices, name, typed(control))
        except (t.TraitError, SpecError):
            to_control()

    control.observe(to_trait, "value")
    to_control()
    choices.observe(to_control, name)
