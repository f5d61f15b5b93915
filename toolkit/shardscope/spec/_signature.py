"""Signatures and docstrings of specs for ``help`` and a notebook's ``?``: plain types, defaults, and every field."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature, cleandoc
from textwrap import indent
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo


class _Type:
    """The type of a field, written when it is shown."""

    def __init__(self, field: FieldInfo) -> None:
        self.field = field

    def __repr__(self) -> str:
        return type_text(self.field.annotation)


class _Default:
    """The default of a field, made and written when it is shown."""

    def __init__(self, field: FieldInfo) -> None:
        self.field = field

    def __repr__(self) -> str:
        default = self.field.get_default(call_default_factory=True)
        return default._in_signature() if hasattr(default, "_in_signature") else repr(default)  # noqa: SLF001


def signature_of(fields: Mapping[str, FieldInfo], positional: str | None) -> Signature:
    """Return a signature with one parameter per field; `positional` comes first and can be given without its name."""
    ordered = sorted(fields, key=lambda name: name != positional)
    kinds = {positional: Parameter.POSITIONAL_OR_KEYWORD}
    return Signature(
        [
            Parameter(
                name,
                kinds.get(name, Parameter.KEYWORD_ONLY),
                annotation=_Type(fields[name]),
                default=Parameter.empty if fields[name].is_required() else _Default(fields[name]),
            )
            for name in ordered
        ]
    )


def docstring_of(docstring: str, fields: Mapping[str, FieldInfo]) -> str:
    """Return a class's docstring with its fields added."""
    texts = {name: field.description for name, field in fields.items() if field.description}
    lines = [f"    {name}: {indent(text, 8 * ' ').lstrip()}" for name, text in texts.items()]
    return "\n".join([cleandoc(docstring), *(["", "Args:", *lines] if lines else [])])


def type_text(annotation: Any) -> str:
    """Return a type without its bounds.

    Example:
        >>> type_text(Annotated[int, "at least 1"] | None), type_text(tuple[int, ...])
        ('int | None', 'tuple[int, ...]')
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(inner[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(type_text, inner)))
    if annotation in (NoneType, ...):
        return "None" if annotation is NoneType else "..."
    if isinstance(origin, type):
        return f"{origin.__name__}[{', '.join(map(type_text, inner))}]"
    if hasattr(annotation, "_in_annotation"):
        return str(annotation._in_annotation())  # noqa: SLF001
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
