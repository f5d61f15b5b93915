"""Forms as classes of traits: bounds, choices, help and defaults of the fields of specs are taken from the specs.

`trait_of` makes a trait for a spec's field, `own_trait` one for a choice that is not a field of any spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import traitlets as t
from pydantic import BeforeValidator

from shardscope.errors import SpecError, unknown_name
from shardscope.spec import Method, registry
from shardscope.spec._base import Spec, takes
from shardscope.spec.fields import bounds_of, members_of, summary_of

UNSET = "default"
"""How forms show None where that is the default."""
OFF = "none"
"""How forms show None where another value is the default."""
_Form = TypeVar("_Form", bound=t.HasTraits)
_KINDS: dict[Any, str] = {bool: "switch", int: "count", float: "number", str: "text"}


class Setting(NamedTuple):
    """A spec's field, or a choice of the form's own, as a form shows it.

    `kind` is ``choice`` (among `values`), ``method`` (by its name), ``switch``, ``count``, ``number``, ``text`` or
    ``other``. An `optional` setting may be left empty, which stands for None.
    """

    spec: type[Spec] | None
    field: str
    label: str
    help: str
    kind: str
    default: Any
    values: tuple[tuple[str, Any], ...] = ()
    optional: bool = False
    least: float | None = None
    most: float | None = None
    step: float | None = None
    slider: str = ""
    """How a slider writes its value, such as ``.1f``; if empty, the control is a box or a list."""
    reach: float | None = None
    """Largest value that a control offers at first, where code may set more."""


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
        marks = setting.spec.model_fields[setting.field].metadata if setting.spec else ()
        for mark in marks:
            if value not in known and isinstance(mark, BeforeValidator):
                value = mark.func(value)  # type: ignore[call-arg]
        if value not in known:
            raise unknown_name(str(self.name), value, map(str, known))
        return value


class _InRange:
    """A number within the bounds of its setting."""

    def validate(self: Any, obj: Any, value: Any) -> Any:
        value = super().validate(obj, value)  # type: ignore[misc]
        setting = setting_in(type(obj), self.name)
        least = -inf if setting.least is None else setting.least
        most = inf if setting.most is None else setting.most
        if not least <= value <= most:
            wanted = f"of {least:g} or more" if most == inf else f"from {least:g} to {most:g}"
            raise SpecError(f"{self.name}={value:g} is out of range; give a value {wanted}")
        return value


class _OwnCount(_InRange, t.Int):  # type: ignore[type-arg]
    pass


class _OwnNumber(_InRange, t.Float):  # type: ignore[type-arg]
    pass


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


def own_trait(default: Any, label: str, about: str, **otherwise: Any) -> Any:
    """Return a trait for a choice that is not a field of any spec.

    Args:
        default: Its type is the trait's: a switch, a count, a number or a text.
        label: Label of the control.
        about: What the choice is, as a sentence: the help of the trait and of the control.
        otherwise: Other attributes of the `Setting`: bounds, ``values`` or a function that returns them, ``slider``,
            and ``kind="choice"`` where other values are rejected.
    """
    kind = otherwise.pop("kind", _KINDS.get(type(default), "other"))
    make = {"choice": _Choice, "switch": t.Bool, "count": _OwnCount, "number": _OwnNumber, "text": t.Unicode}
    return make.get(kind, t.Any)(default, help=about).tag(own=(label, about, kind, default, otherwise))


def setting_in(choices: type[t.HasTraits], name: str) -> Setting:
    """Return the setting behind a trait that `trait_of` or `own_trait` made."""
    metadata = choices.class_traits()[name].metadata
    if "own" in metadata:
        *first, otherwise = metadata["own"]
        values = otherwise.get("values", ())
        return Setting(
            None, name, *first, **{**otherwise, "values": values() if callable(values) else values}
        )
    spec, field, label, otherwise = metadata["field"]
    return setting_of(spec, field, label, **otherwise)


def form_of(spec: type[Spec], *, without: Iterable[str]) -> Callable[[type[_Form]], type[_Form]]:
    """Decorate a class of traits: fields of `spec` that it does not mention get their traits too, but for `without`.

    So a field that is new in the spec shows up in the form by itself.
    """

    def add(form: type[_Form]) -> type[_Form]:
        known = {*traits_for(form, spec), *form.class_traits(), *without}
        rest = [field for field in spec.model_fields if field not in known]
        for field in rest:
            if setting_of(spec, field).kind != "other":
                setattr(form, field, trait_of(spec, field))
        form.setup_class(dict(vars(form)))
        return form

    return add


def names_in(choices: type[t.HasTraits]) -> list[str]:
    """Names of the traits with a control, in the order in which they are defined."""
    known = choices.class_traits(own=bool) | choices.class_traits(field=bool)
    return [name for base in reversed(choices.__mro__) for name in vars(base) if name in known]


def in_groups(choices: type[t.HasTraits], groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the groups, the last one with the controls that no group lists."""
    listed = {name for group in groups for name in group}
    *others, last = map(list, groups)
    return [*others, last + [name for name in names_in(choices) if name not in listed]]


def traits_for(choices: type[t.HasTraits], spec: type[Spec]) -> list[str]:
    """The traits that stand for fields of a spec."""
    return list(choices.class_traits(field=lambda about: about is not None and about[0] is spec))
