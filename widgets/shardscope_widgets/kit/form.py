"""Forms as classes of traits, whose bounds, choices, help texts and defaults are taken from the fields of specs.

`trait_of` creates a trait for a field of a spec; `own_trait` creates a trait for an input that is not such a field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import traitlets as t
from pydantic import BeforeValidator

from shardscope.errors import SpecError, unknown_name
from shardscope.spec import Method, Strategy, registry
from shardscope.spec._base import Spec, takes
from shardscope.spec.fields import bounds_of, members_of, summary_of

UNSET = "default"
"""Text that forms show for None if None is the default."""
OFF = "none"
"""Text that forms show for None if the default is another value."""
_Form = TypeVar("_Form", bound=t.HasTraits)
_KINDS: dict[Any, str] = {bool: "switch", int: "count", float: "number", str: "text"}


class Setting(NamedTuple):
    """Description of one form entry: a field of a spec, or an input that only the form has (`spec` is then None).

    `kind` is ``choice`` (one of `values`), ``combo`` (one of `values`, or a text), ``method`` (by name), ``switch``,
    ``count``, ``number``, ``text`` or ``other``. An `optional` setting may be left empty, which means None. `least` and
    `most` are its bounds; None means unbounded. `values` are pairs of a displayed text and its value.
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
    """Format of a slider's value, such as ``.1f``; if empty, the control is a box or a list instead of a slider."""
    reach: float | None = None
    """Largest value that the control initially offers; code may set larger values up to `most`."""
    blank: str = ""
    """Placeholder text for a box that is empty at 0, if 0 stands for a default; empty if 0 is an ordinary value."""


def setting_of(spec: type[Spec], field: str, label: str = "", **otherwise: Any) -> Setting:
    """Return the `Setting` for a field of a spec.

    Args:
        spec: The spec class.
        field: Name of the field.
        label: Label of the control; by default the name of the field.
        otherwise: Attributes of the `Setting` to override, such as `default`.
    """
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
    """Return (text, value) pairs for `Setting.values`, where the text is ``str(value)``."""
    return tuple((str(value), value) for value in values)


def option_of(value: Any) -> Any:
    """Return a value as traits store it: a method as its name, or as its short string, if that says everything."""
    if not isinstance(value, Method):
        return value
    if not value.changed:
        return value.name
    with suppress(SpecError):
        if isinstance(value, Strategy) and Strategy.by_name(value.label) == value:
            return value.label
    return value


class _Choice(t.TraitType[Any, Any]):
    """A trait that accepts the values of a field, and anything, such as an alias, that the spec converts to one."""

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
    """Mixin for a numeric trait whose value must be within the bounds of its setting."""

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
    """Return a trait for a field of a spec; the arguments are the same as for `setting_of`."""
    setting = setting_of(
        spec, field, label, **{"values": (), **otherwise}
    )  # a user may register methods later
    bounds = {"min": setting.least, "max": setting.most} if setting.kind in {"count", "number"} else {}
    make = _TRAITS.get(setting.kind, t.Any)
    if setting.optional:
        make = {"count": t.CInt, "number": t.CFloat}.get(setting.kind, make)
    made = make(setting.default, allow_none=setting.optional, help=setting.help, **bounds)
    return made.tag(field=(spec, field, label, otherwise))


def own_trait(default: Any, label: str, about: str, **otherwise: Any) -> Any:
    """Return a trait for an input that is not a field of any spec.

    Args:
        default: Default value; its type (bool, int, float or str) decides the type of the trait.
        label: Label of the control.
        about: A sentence that describes the input, used as help text of the trait and tooltip of the control.
        otherwise: Other attributes of the `Setting`: bounds, ``values`` or a function that returns them, ``slider``,
            and ``kind="choice"`` to reject any other value.
    """
    kind = otherwise.pop("kind", _KINDS.get(type(default), "other"))
    make = {"choice": _Choice, "switch": t.Bool, "count": _OwnCount, "number": _OwnNumber, "text": t.Unicode}
    return make.get(kind, t.Any)(default, help=about).tag(own=(label, about, kind, default, otherwise))


def setting_in(choices: type[t.HasTraits], name: str) -> Setting:
    """Return the setting from which `trait_of` or `own_trait` created a trait."""
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
    """Return a class decorator that adds a trait for each field of `spec`, unless the class defines the trait itself.

    So a field that is added to the spec appears in the form automatically.

    Args:
        spec: The spec class.
        without: Fields that get no trait.
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


def check_options(widget: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check the names of the options that are passed to a widget.

    Raises:
        TypeError: A name is not among the `known` names.
    """
    accepted = sorted(known)
    for name in given:
        if name not in accepted:
            raise TypeError(f"{widget} has no option {name!r}; use one of {', '.join(accepted)}")


def names_in(choices: type[t.HasTraits]) -> list[str]:
    """Return the names of the traits that have a control, in order of definition."""
    known = choices.class_traits(own=bool) | choices.class_traits(field=bool)
    return [name for base in reversed(choices.__mro__) for name in vars(base) if name in known]


def in_groups(choices: type[t.HasTraits], groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the groups as lists; names of controls that are in no group are added to the last group."""
    listed = {name for group in groups for name in group}
    *others, last = map(list, groups)
    return [*others, last + [name for name in names_in(choices) if name not in listed]]


def traits_for(choices: type[t.HasTraits], spec: type[Spec]) -> list[str]:
    """Return the names of the traits that represent fields of a spec."""
    return list(choices.class_traits(field=lambda about: about is not None and about[0] is spec))
