"""The base class of every part of a job: an immutable, validated value that can be saved as JSON and read back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import Parameter, Signature, cleandoc
from textwrap import indent
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import from_json

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec._field_texts import describe_fields

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""Lone surrogates, by which Python represents bytes of file names that are not valid UTF-8."""
_PLAIN = (str, int, float, type(None))
"""Types whose values need no check in addition to pydantic's."""
_WANTED = {
    "int": "a whole number",
    "int_from_float": "a whole number",
    "float": "a number",
    "bool": "True or False",
}
"""Expected value in words, by the type of pydantic's error without its suffix."""

_left_out: ContextVar[list[str] | None] = ContextVar("left_out", default=None)
"""Names of the unknown fields dropped so far; None if unknown fields are rejected."""


@contextmanager
def leaving_out_unknown_fields() -> Iterator[list[str]]:
    """Context manager in which unknown fields are dropped, not rejected; yields a list of the dropped fields' names.

    Used when past runs are listed: a field added by a newer version must not make the runs of that version unreadable.
    """
    names: list[str] = []
    token = _left_out.set(names)
    try:
        yield names
    finally:
        _left_out.reset(token)


def without_unknown(cls: type[BaseModel], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `fields`; inside `leaving_out_unknown_fields`, drop and record fields unknown to `cls`."""
    names = _left_out.get()
    if names is None or cls.model_config.get("extra") != "forbid":
        return {**fields}
    names += [f"{cls.__name__}.{name}" for name in fields if name not in cls.model_fields]
    return {name: value for name, value in fields.items() if name in cls.model_fields}


class Spec(BaseModel):
    """Frozen pydantic model that reports each validation error as one readable sentence.

    A subclass may name one field in `_positional`, which can then be given without its name:
    ``Optimizer("lamb", lr=2e-3)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    _positional: ClassVar[str | None] = None

    def __init__(self, /, *args: Any, **fields: Any) -> None:
        if args:
            fields = self._with_positional(args, fields)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _readable(type(self), error) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_options: Any) -> None:
        describe_fields(cls)
        cls.__signature__ = cls._signature()
        docstring = vars(cls).get("__doc__")
        if docstring:
            cls.__doc__ = docstring_of(docstring, cls.model_fields)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the descriptions of the fields; these are set after pydantic has built the class."""
        found = handler(core_schema)
        shown = handler.resolve_ref_schema(found).get("properties", {})
        for name, field in cls.model_fields.items():
            if field.description is not None and (about := shown.get(field.alias or name)) is not None:
                about.setdefault("description", field.description)
        return found

    @classmethod
    def _signature(cls) -> Signature:
        return signature_of(cls.model_fields, cls._positional)

    @classmethod
    def _in_annotation(cls) -> str:
        """Return the name of this type in the annotations of a signature."""
        return cls.__name__

    def _in_signature(self) -> str:
        """Return the text of this value as a default in a signature."""
        first = getattr(self, self._positional) if self._positional else None
        return f"{type(self).__name__}({'' if first is None else repr(first)})"

    @classmethod
    def _with_positional(cls, args: tuple[Any, ...], fields: dict[str, Any]) -> dict[str, Any]:
        name = cls._positional
        if name is None or len(args) > 1:
            raise SpecError(
                f"{cls.__name__} takes {'one' if name else 'no'} positional argument, got {quoted(args)}; "
                "give fields by name"
            )
        if name in fields:
            raise SpecError(
                f"{cls.__name__}: {name} is given twice, as {quoted(args[0])} and {quoted(fields[name])}; give it once"
            )
        return {name: args[0], **fields}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; the copy is validated again."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    def to_json(self) -> str:
        """Return this value as indented JSON; `from_json` reads it back."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a value from the JSON that `to_json` wrote.

        Raises:
            SpecError: The text is not JSON, it is not a JSON object, or a field is invalid.
        """
        try:
            fields = from_json(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise SpecError(f"{cls.__name__}: {quoted(text)} is not JSON: {error}") from None
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: Any) -> Self:
        """Build the value from a mapping of field names to values, as in JSON.

        Raises:
            SpecError: `fields` is not a mapping with string keys, or a field is invalid.
        """
        if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
            raise SpecError(
                f"{cls.__name__} must be a JSON object with field names as keys, such as {{...}}; got {quoted(fields)}"
            )
        return cls(**fields)

    @model_validator(mode="before")
    @classmethod
    def _well_formed(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known, fields = cls.__pydantic_fields__, without_unknown(cls, fields)
        for name, value in fields.items():
            if name in known and (type(value) not in _PLAIN or isinstance(value, str)):
                cls._check_form(name, value)
        return fields

    @classmethod
    def _check_form(cls, name: str, value: Any) -> None:
        """Reject a bool in a field that accepts none, text that JSON cannot store, and keys that are not strings."""
        if isinstance(value, bool) and not takes(cls.model_fields[name].annotation, bool):
            raise SpecError(
                f"{cls._prefix()}{name}={value} is a bool, which this field does not accept; "
                "give a valid value, or leave it out"
            )
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, str) and _HALF_CHARACTER.search(item):
                raise SpecError(
                    f"{cls._prefix()}{name}={quoted(item)} is not text in UTF-8, so it cannot be saved; "
                    "rename the file, or give other text"
                )
            if isinstance(item, dict) and not all(isinstance(key, str) for key in item):
                raise SpecError(
                    f"{cls._prefix()}{name}={quoted(value)} has keys that are not strings; use setting names"
                )

    @classmethod
    def _prefix(cls) -> str:
        """Prefix of field names in error messages."""
        return ""


def _readable(cls: type[Spec], error: ValidationError) -> SpecError:
    """Return a `SpecError` for the first problem in a pydantic error: a sentence with field, value and remedy."""
    problem = error.errors()[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return cause
    path = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        owner = cls.__name__ if len(path) == 1 else ".".join(path[:-1])
        return unknown_name(f"{owner} field", path[-1], cls.model_fields)
    field = ".".join(path) or cls.__name__
    if problem["type"] == "missing":
        return SpecError(f"{cls.__name__} requires {field}; give {field}=...")
    if wanted := _WANTED.get(problem["type"].removesuffix("_parsing").removesuffix("_type")):
        return SpecError(f"{cls._prefix()}{field}={quoted(problem['input'])} is not valid; give {wanted}")
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return SpecError(f"{cls._prefix()}{field}={quoted(problem['input'])} is not valid: {message}")


def takes(annotation: Any, kind: type) -> bool:
    """Return whether a type annotation is `kind` or `Any`, or contains one of them."""
    return annotation in (kind, Any) or any(takes(member, kind) for member in get_args(annotation))


class _Type:
    """A field's annotation in a signature, formatted only when the signature is shown."""

    def __init__(self, field: FieldInfo) -> None:
        self.field = field

    def __repr__(self) -> str:
        return type_text(self.field.annotation)


class _Default:
    """A field's default in a signature, built and formatted only when the signature is shown."""

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
    """Return a class's docstring with an ``Args`` section that describes its fields."""
    texts = {name: field.description for name, field in fields.items() if field.description}
    lines = [f"    {name}: {indent(text, 8 * ' ').lstrip()}" for name, text in texts.items()]
    return "\n".join([cleandoc(docstring), *(["", "Args:", *lines] if lines else [])])


def type_text(annotation: Any) -> str:
    """Return a type annotation as text, without the bounds in `Annotated`.

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
