"""The base of every part of a job: an immutable, validated value that goes to JSON and back."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

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
