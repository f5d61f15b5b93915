"""The base of every part of a job: an immutable, validated value that goes to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from shardscope.errors import SpecError, unknown_name


class Spec(BaseModel):
    """Frozen pydantic model whose errors are one readable sentence each.

    A subclass may name one field in `_positional`, which can then be given without its name:
    ``Optimizer("lamb", lr=2e-3)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    _positional: ClassVar[str | None] = None

    def __init__(self, *args: Any, **fields: Any) -> None:
        if args:
            fields = self._with_positional(args, fields)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _readable(type(self), error) from None

    @classmethod
    def _with_positional(cls, args: tuple[Any, ...], fields: dict[str, Any]) -> dict[str, Any]:
        name = cls._positional
        if name is None or len(args) > 1:
            raise SpecError(
                f"{cls.__name__} takes {'one' if name else 'no'} argument without a name, got {args!r}"
            )
        if name in fields:
            raise SpecError(f"{cls.__name__}: {name} is given twice, as {args[0]!r} and {fields[name]!r}")
        return {name: args[0], **fields}

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated anew."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    def to_json(self) -> str:
        """This value as indented JSON; `from_json` reads it back."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            SpecError: The text is no JSON, or describes something that cannot exist.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise _readable(cls, error) from None


class Choice(Spec):
    """One of several named ways, with settings: None leaves one at the name's default, and none is ever ignored.

    A subclass says what errors call it, in `_field`, and which settings each name has, in `_defaults`.
    """

    _positional = "name"
    _field: ClassVar[str]
    _defaults: ClassVar[Mapping[str, Mapping[str, Any]]]

    name: str

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str) -> str:
        if name not in cls._defaults:
            raise unknown_name(cls._field, name, cls._defaults)
        return name

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes True for 1."""
        field = str(info.field_name)
        if isinstance(value, bool) and bool not in get_args(cls.model_fields[field].annotation):
            raise SpecError(
                f"{cls._field}.{field}={value} is a truth value, which this setting does not take; "
                "give one that it takes, or leave it out"
            )
        return value

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        for field, value in self._given().items():
            if field not in self._defaults[self.name]:
                users = " or ".join(name for name, settings in self._defaults.items() if field in settings)
                raise SpecError(
                    f"{self._field}.{field}={value!r} has no effect on {self.name}; leave it out, or use {users}"
                )
        return self

    def _given(self) -> dict[str, Any]:
        """Settings that are not left at their defaults."""
        values = {field: getattr(self, field) for field in type(self).model_fields if field != "name"}
        return {field: value for field, value in values.items() if value is not None}

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting that has an effect, as given or by the name's default."""
        return {**self._defaults[self.name], **self._given()}


def _readable(cls: type[BaseModel], error: ValidationError) -> SpecError:
    """The first problem of a pydantic error as one sentence: what, got, do."""
    problem = error.errors()[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return cause
    path = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        owner = cls.__name__ if len(path) == 1 else ".".join(path[:-1])
        return unknown_name(f"field of {owner}", path[-1], cls.model_fields)
    field = ".".join(path) or cls.__name__
    if problem["type"] == "missing":
        return SpecError(f"{cls.__name__} needs {field}; give {field}=...")
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return SpecError(f"{field}={problem['input']!r} is not valid: {message}")
