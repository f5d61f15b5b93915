"""Metadata of spec fields, used to generate command-line options and form controls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shardscope.spec.units import Reader


def members_of(annotation: Any) -> Iterator[Any]:
    """Yield the values of a Literal or the types of a union, without None; `str` for any other non-class annotation."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif hasattr(annotation, "__metadata__"):
        yield from members_of(annotation.__origin__)
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from members_of(member)
    elif annotation is not NoneType:
        yield annotation if isinstance(annotation, type) else str


def has_unit(field: FieldInfo) -> bool:
    """Return whether a field is a quantity, whose text must state a unit."""
    inside = [mark for member in get_args(field.annotation) for mark in getattr(member, "__metadata__", ())]
    return any(isinstance(getattr(mark, "func", None), Reader) for mark in [*field.metadata, *inside])


def bounds_of(field: FieldInfo) -> tuple[Any, Any]:
    """Return the lower and upper bound of a numeric field, inclusive or exclusive; None for a missing bound."""
    marks = list(field.metadata)
    for member in get_args(field.annotation):
        for inner in getattr(member, "__metadata__", ()):
            marks += getattr(inner, "metadata", ())
    bounds = {
        name: getattr(mark, name)
        for mark in marks
        for name in ("ge", "gt", "le", "lt")
        if hasattr(mark, name)
    }
    return bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))


def summary_of(field: FieldInfo, *, nothing: str) -> str:
    """Return the first sentence of a field's docstring without its full stop, with `nothing` in place of "None"."""
    text = " ".join((field.description or "").split())
    sentence = re.split(r"\.(?=\s|$)", text, maxsplit=1)[0].replace("`", "")
    return re.sub(r"\bNone\b", nothing, sentence)
