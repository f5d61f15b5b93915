"""Command-line options generated from the fields of a spec, so that every new field gets an option and a help text."""

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
    """Return the command-line option of a field, such as ``--checkpoint-every`` for the nested ``checkpoint.every``."""
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
    shape: str | None = None,
) -> None:
    """Add the command-line option of one field.

    The parsed value is stored under the name `place`; it is None if the option is not given. The spec validates the
    value later, and its error messages say how to correct it.

    Args:
        parser: The parser to which the option is added.
        spec: The spec with the field.
        place: Name of the field, or path of a nested field, such as ``checkpoint.every``.
        flags: Names of the option, such as ``--ranks``; by default, `flag_of` of the field.
        about: Help text of the option; by default, the first sentence of the field's docstring.
        default: Default value as shown in the help; by default, the default of the field.
        names: Valid values, if the field's type does not list them; the help shows them in place of a metavariable.
            Names of methods are instead listed after the help text, because there are many and because a method may
            be given with settings.
        shape: Metavariable of the value in the help; by default, the valid values, or the field's name.
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
    called = f"{{{','.join(named)}}}" if named else place.rpartition(".")[2].upper()
    parser.add_argument(
        *(flags or (flag_of(place),)), dest=place, default=None, help=text.replace("%", "%%"),
        **({"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": shape or called}),
    )  # fmt: skip


def parts_of(spec: type[Spec]) -> Iterator[tuple[str, type[Spec]]]:
    """Yield the name and type of each field that is a nested spec but not a method."""
    for name, field in spec.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Spec) and not issubclass(kind, Method):
            yield name, kind


def methods_of(spec: type[Spec]) -> Iterator[tuple[str, type[Method]]]:
    """Yield the name of each field whose value is a method, and the base class of these methods."""
    for name, field in spec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Method):
            yield name, field.annotation


def _methods_in(annotation: Any) -> list[type[Method]]:
    """Return the base classes of the methods that a field accepts."""
    return [each for each in members_of(annotation) if isinstance(each, type) and issubclass(each, Method)]


def given_fields(arguments: argparse.Namespace, spec: type[Spec], part: str = "") -> dict[str, Any]:
    """Return the values of the options that the user gave, by field of `spec`.

    For a nested spec, `part` is the name of the field that holds it.
    """
    values = vars(arguments)
    places = {name: f"{part}.{name}" if part else name for name in spec.model_fields}
    return {name: values[place] for name, place in places.items() if values.get(place) is not None}


def _type_of(annotation: Any) -> tuple[type, tuple[str, ...]]:
    """Return the type to which an option's text is converted, and the valid values if the annotation is a literal."""
    members = tuple(members_of(annotation))
    kinds = {member if isinstance(member, type) else type(member) for member in members}
    known = tuple(str(member) for member in members if not isinstance(member, type))
    kind = next((kind for kind in (bool, int, float) if kinds == {kind}), str)
    return float if kinds == {int, float} else kind, known


def _as_in_a_terminal(sentence: str) -> str:
    """Return the sentence with a lower-case first letter, unless its first word is an abbreviation."""
    is_a_name = any(letter.isupper() for letter in sentence.partition(" ")[0][1:])  # such as CPU or ZeRO
    return sentence if is_a_name else sentence[:1].lower() + sentence[1:]


def _default_text(value: Any) -> str:
    """Return a field's default value as shown in the help; an empty string for None and False."""
    if isinstance(value, Method):
        return value.name
    if isinstance(value, bool) or value is None:
        return "on" if value else ""
    return f"{value:g}" if isinstance(value, float) else str(value)
