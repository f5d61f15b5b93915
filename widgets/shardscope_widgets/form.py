"""Forms: traits and controls of the fields of specs, which take bounds, choices, help and defaults from there."""

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
"""Of what can be typed: the largest whole number that a page holds exactly."""
_KINDS: dict[Any, str] = {bool: "switch", int: "count", float: "number", str: "text"}


class Setting(NamedTuple):
    """A field as a form shows it.

    `kind` is ``choice`` (among `values`), ``method`` (by its name), ``switch``, ``count``, ``number``, ``text`` or
    ``other``. What is `optional` may be left open, which is None.
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
    """A field as a form shows it; `otherwise` is what a form has otherwise than the spec, such as its default."""
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
    """Values under their own names, as `Setting.values` has them."""
    return tuple((str(value), value) for value in values)


def option_of(value: Any) -> Any:
    """A setting's value as forms have it: a method without settings of its own by its name."""
    return value.name if isinstance(value, Method) and not value.changed else value


class _Choice(t.TraitType[Any, Any]):
    """One of a field's values, or what its spec reads as one, such as an alias."""

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
    """The trait of a field; `otherwise` is as for `setting_of`."""
    setting = setting_of(spec, field, label, **{"values": (), **otherwise})  # a user may add methods later
    bounds = {"min": setting.least, "max": setting.most} if setting.kind in {"count", "number"} else {}
    make = _TRAITS.get(setting.kind, t.Any)
    if setting.optional:
        make = {"count": t.CInt, "number": t.CFloat}.get(setting.kind, make)
    made = make(setting.default, allow_none=setting.optional, help=setting.help, **bounds)
    return made.tag(field=(spec, field, label, otherwise))


def setting_in(choices: type[t.HasTraits], name: str) -> Setting:
    """What a trait of `trait_of` stands for."""
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
    """The control of a setting, at its default."""
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
    """Let a control show a value; a list or slider that lacks it gets a place for it: a function of the user's."""
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
    """Keep each control equal to the trait of its name, whose help it shows; the trait takes what the control does."""
    for name, control in controls.items():
        control.tooltip = choices.traits()[name].help
        t.link((choices, name), (control, "value"))


def bind(choices: t.HasTraits, controls: Mapping[str, widgets.DOMWidget]) -> None:
    """The same where the control shows whatever the trait takes; what the trait refuses is taken back."""
    for name, control in controls.items():
        control.tooltip = choices.traits()[name].help
        _bind(choices, name, control)


def _bind(choices: t.HasTraits, name: str, control: widgets.DOMWidget) -> None:
    def to_control(_change: object = None) -> None:
        control.unobserve(to_trait, "value")  # a list that gets another place goes to its first for a moment
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
