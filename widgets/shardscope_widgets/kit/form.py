"""Forms: traits and controls for the fields of specs, with bounds, choices, help and defaults taken from the specs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor, log10
from types import NoneType
from typing import Any, NamedTuple

import ipywidgets as widgets
import traitlets as t
from pydantic import BeforeValidator

from shardscope.errors import unknown_name
from shardscope.spec import Method, registry
from shardscope.spec._base import Spec, takes
from shardscope.spec.fields import bounds_of, members_of, summary_of

UNSET = "default"
"""How forms show None where that is the default."""
OFF = "none"
"""How forms show None where another value is the default."""
MOST = 2**53 - 1
"""Largest number that can be typed: the largest integer that JavaScript represents exactly."""
_KINDS: dict[Any, str] = {bool: "switch", int: "count", float: "number", str: "text"}


class Setting(NamedTuple):
    """A spec's field as a form shows it.

    `kind` is ``choice`` (among `values`), ``method`` (by its name), ``switch``, ``count``, ``number``, ``text`` or
    ``other``. An `optional` setting may be left empty, which stands for None.
    """

    spec: type[Spec]
    field: str
    label: str
    help: str
    kind: str
    default: Any
    values: tuple[tuple[str, Any], ...] = ()
    optional: bool = False
    least: float | None = None
    most: float | None = None


def setting_of(spec: type[Spec], field: str, label: str = "", **otherwise: Any) -> Setting:
    """Return a field as a form shows it; `otherwise` overrides attributes of the `Setting`, such as its default."""
    info = spec.model_fields[field]
    label = label or field.replace("_", " ").capitalize()
    members = tuple(members_of(info.annotation))
    kind = _kind(members)
    optional = kind in {"count", "number", "text"} and takes(info.annotation, NoneType)
    least, most = bounds_of(info)
    if kind == "method" and "values" not in otherwise:
        otherwise["values"] = tuple((each.heading(), each.name) for each in registry.all_of(members[0]))
    default = option_of(info.get_default(call_default_factory=True))
    help_ = f"{summary_of(info, nothing=f'“{UNSET if default is None else OFF}”') or label}."
    values = named(members) if kind == "choice" else ()
    made = Setting(spec, field, label, help_, kind, default, values, optional, least, most)
    return made._replace(**otherwise)


def _kind(members: tuple[Any, ...]) -> str:
    if not any(isinstance(member, type) for member in members):
        return "choice"
    if len(members) > 1:
        return "other"
    return "method" if issubclass(members[0], Method) else _KINDS.get(members[0], "other")


def named(values: Iterable[Any]) -> tuple[tuple[str, Any], ...]:
    """Pairs of (text, value) for `Setting.values`, each value labelled with its own text."""
    return tuple((str(value), value) for value in values)


def option_of(value: Any) -> Any:
    """A setting's value as forms hold it: a method with default settings becomes its name."""
    return value.name if isinstance(value, Method) and not value.changed else value


class _Choice(t.TraitType[Any, Any]):
    """A trait for one of a field's values; anything that the spec converts to one, such as an alias, is accepted."""

    def validate(self, obj: Any, value: Any) -> Any:
        setting = setting_in(type(obj), str(self.name))
        known = [each for _, each in setting.values]
        for mark in setting.spec.model_fields[setting.field].metadata:
            if value not in known and isinstance(mark, BeforeValidator):
                value = mark.func(value)  # type: ignore[call-arg]
        if value not in known:
            raise unknown_name(str(self.name), value, map(str, known))
        return value


_TRAITS: dict[str, Any] = {
    "choice": _Choice, "method": t.Unicode, "switch": t.Bool, "count": t.Int, "number": t.Float, "text": t.Unicode,
}  # fmt: skip


def trait_of(spec: type[Spec], field: str, label: str = "", **otherwise: Any) -> Any:
    """Return a trait for a field; `otherwise` is as for `setting_of`."""
    setting = setting_of(spec, field, label, **{"values": (), **otherwise})  # a user may add methods later
    bounds = {"min": setting.least, "max": setting.most} if setting.kind in {"count", "number"} else {}
    make = _TRAITS.get(setting.kind, t.Any)
    if setting.optional:
        make = {"count": t.CInt, "number": t.CFloat}.get(setting.kind, make)
    made = make(setting.default, allow_none=setting.optional, help=setting.help, **bounds)
    return made.tag(field=(spec, field, label, otherwise))


def setting_in(choices: type[t.HasTraits], name: str) -> Setting:
    """Return the setting behind a trait that `trait_of` made."""
    spec, field, label, otherwise = choices.class_traits()[name].metadata["field"]
    return setting_of(spec, field, label, **otherwise)


def traits_for(choices: type[t.HasTraits], spec: type[Spec]) -> list[str]:
    """The traits that stand for fields of a spec."""
    return list(choices.class_traits(field=lambda about: about is not None and about[0] is spec))


class Open(widgets.Text):  # type: ignore[misc]
    """A box that may be left empty, which stands for None."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(continuous_update=False, **{"placeholder": UNSET, **settings})


def control_of(setting: Setting) -> widgets.DOMWidget:
    """Return a control for a setting, at its default."""
    about: dict[str, Any] = {"description": setting.label, "tooltip": setting.help}
    if setting.optional:
        shown = {} if setting.default is None else {"value": str(setting.default), "placeholder": OFF}
        return Open(**shown, **about)
    about["value"] = setting.default
    if setting.values:
        return widgets.Dropdown(options=setting.values, **about)
    if setting.kind == "switch":
        return widgets.Checkbox(indent=False, **about)
    if setting.kind not in {"count", "number"}:
        return widgets.Text(continuous_update=False, **about)
    about["min"] = -MOST if setting.least is None else setting.least
    about["max"] = MOST if setting.most is None else min(setting.most, MOST)
    if setting.kind == "count":
        return widgets.BoundedIntText(**about)
    step = 10.0 ** (floor(log10(abs(setting.default))) - 1) if setting.default else 0.001
    return widgets.BoundedFloatText(step=step, **about)


def show(control: widgets.DOMWidget, value: Any) -> None:
    """Make a control show a value; a list or slider that lacks it, such as a user's function, gets an entry for it."""
    if isinstance(control, Open):
        value = "" if value is None else str(value)
    elif isinstance(control, widgets.SelectionSlider):
        if value not in control.options:
            control.options = sorted([*control.options, value])
    elif isinstance(control, widgets.Dropdown):
        pairs = [each if isinstance(each, tuple) else (str(each), each) for each in control.options]
        if not any(known == value for _, known in pairs):
            control.options = [*pairs, (getattr(value, "__name__", str(value)), value)]
    control.value = value


def typed(control: widgets.DOMWidget) -> Any:
    """The value that a control shows."""
    return (control.value.strip() or None) if isinstance(control, Open) else control.value


def link(choices: t.HasTraits, controls: Mapping[str, widgets.DOMWidget]) -> None:
    """Link each control both ways to the trait of its name, and show the trait's help as its tooltip."""
    for name, control in controls.items():
        control.tooltip = choices.traits()[name].help
        t.link((choices, name), (control, "value"))


def bind(choices: t.HasTraits, controls: Mapping[str, widgets.DOMWidget]) -> None:
    """Link as `link` does, but show any value of the trait, and undo an input that the trait rejects."""
    for name, control in controls.items():
        control.tooltip = choices.traits()[name].help
        _bind(choices, name, control)


def _bind(choices: t.HasTraits, name: str, control: widgets.DOMWidget) -> None:
    def to_control(_change: object = None) -> None:
        control.unobserve(to_trait, "value")  # a list whose options change briefly selects its first
        show(control, getattr(choices, name))
        control.observe(to_trait, "value")

    def to_trait(_change: object) -> None:
        try:
            setattr(choices, name, typed(control))
        except t.TraitError:
            to_control()

    control.observe(to_trait, "value")
    to_control()
    choices.observe(to_control, name)
