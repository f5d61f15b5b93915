"""Options made from the fields of a spec: a field that is added to one has its option, and its help, at once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any

from shardscope.spec import registry
from shardscope.spec._base import Spec
from shardscope.spec.fields import members_of, summary_of
from shardscope.spec.method import Method


def flag_of(place: str) -> str:
    """The option of a field, or of a part's field: ``--checkpoint-every`` of ``checkpoint.every``."""
    return "--" + re.sub("[._]", "-", place)


def add_field(
    parser: argparse.ArgumentParser,
    spec: type[Spec],
    place: str,
    *,
    flags: Sequence[str] = (),
    about: str | None = None,
    default: str | None = None,
    names: Sequence[str] = (),
) -> None:
    """Add the option of one field; its value is kept under `place`, and is None where the option is not given.

    Values are not checked here but by the spec, whose errors say what to do.

    Args:
        parser: That it is added to.
        spec: Whose field.
        place: The field's name, or that of a part and its field: ``checkpoint.every``.
        flags: Names of the option, where they are not that of the field.
        about: The help, where it is not the first sentence of the field's docstring.
        default: What the help calls the default, where that is not the field's own.
        names: The names to choose from, where the field's type does not list them. Those of methods, which are many
            and may have settings, stand in the help.
    """
    field = spec.model_fields[place.rpartition(".")[2]]
    kind, known = _type_of(field.annotation)
    if about is None:
        about = _as_in_a_terminal(summary_of(field, nothing="leaving it out"))
    if default is None:
        default = _default_text(field.get_default(call_default_factory=True))
    methods = _methods_in(field.annotation)
    listed = names or [each for method in methods for each in registry.names(method)]
    if methods:
        about = f"{about}: {', '.join(listed)}"
    text = f"{about} (default: {default})" if default else about
    named = () if methods else names or known
    shape: dict[str, Any] = {
        "type": kind,
        "metavar": f"{{{','.join(named)}}}" if named else place.rpartition(".")[2].upper(),
    }
    parser.add_argument(
        *(flags or (flag_of(place),)), dest=place, default=None, help=text.replace("%", "%%"),
        **({"action": argparse.BooleanOptionalAction} if kind is bool else shape),
    )  # fmt: skip


def parts_of(spec: type[Spec]) -> Iterator[tuple[str, type[Spec]]]:
    """The fields that are specs themselves and no methods, by name."""
    for name, field in spec.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Spec) and not issubclass(kind, Method):
            yield name, kind


def methods_of(spec: type[Spec]) -> Iterator[tuple[str, type[Method]]]:
    """The fields that are methods, by name."""
    for name, field in spec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Method):
            yield name, field.annotation


def _methods_in(annotation: Any) -> list[type[Method]]:
    """The kinds of methods that a field takes."""
    return [each for each in members_of(annotation) if isinstance(each, type) and issubclass(each, Method)]


def given_fields(arguments: argparse.Namespace, spec: type[Spec], part: str = "") -> dict[str, Any]:
    """The fields whose options were given, of a spec or of its part of this name."""
    values = vars(arguments)
    places = {name: f"{part}.{name}" if part else name for name in spec.model_fields}
    return {name: values[place] for name, place in places.items() if values.get(place) is not None}


def _type_of(annotation: Any) -> tuple[type, tuple[str, ...]]:
    """The type that an option's text is read as, and the names or numbers to choose from, if the type lists them."""
    members = tuple(members_of(annotation))
    kinds = {member if isinstance(member, type) else type(member) for member in members}
    known = tuple(str(member) for member in members if not isinstance(member, type))
    kind = next((kind for kind in (bool, int, float) if kinds == {kind}), str)
    return float if kinds == {int, float} else kind, known


def _as_in_a_terminal(sentence: str) -> str:
    is_a_name = any(letter.isupper() for letter in sentence.partition(" ")[0][1:])  # such as CPU or ZeRO
    return sentence if is_a_name else sentence[:1].lower() + sentence[1:]


def _default_text(value: Any) -> str:
    """Of a field; nothing where it is None or off."""
    if isinstance(value, Method):
        return value.name
    if isinstance(value, bool) or value is None:
        return "on" if value else ""
    return f"{value:g}" if isinstance(value, float) else str(value)
