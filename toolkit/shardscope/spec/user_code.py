"""A function of the user's inside a job: a model, a data set or a loss defined in a script or a notebook cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PrivateAttr

from shardscope.errors import SpecError
from shardscope.spec._base import Spec


class UserCode(Spec):
    """A callable, known in JSON by its name only.

    The code itself travels by cloudpickle in a file of the run directory that is private to the user and never leaves
    it: a `job.json` that someone else sends you names the function but cannot run anything.
    """

    name: str
    """The callable's own name, for messages and plots."""
    _function: Callable[..., Any] | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Self:
        """Wrap a callable, under its own name or another."""
        code = cls(name=name or getattr(function, "__name__", type(function).__name__))
        code._function = function
        return code

    @property
    def is_here(self) -> bool:
        """Whether the callable itself is known, and not its name alone."""
        return self._function is not None

    @property
    def function(self) -> Callable[..., Any]:
        """The callable.

        Raises:
            SpecError: This job was read from JSON, which carries the name alone.
        """
        if self._function is None:
            raise SpecError(
                f"the code of {self.name!r} is not part of this job.json; give the function again with "
                "job.replace(...), or take it from its run with ss.load_job(run, trust_code=True)"
            )
        return self._function


def _wrap(value: Any) -> Any:
    if callable(value) and not isinstance(value, UserCode):
        return UserCode.of(value)
    return value


Named = Annotated[str | UserCode, BeforeValidator(_wrap)]
"""A name from a catalogue, or a callable of the user's."""


def label_of(value: str | UserCode) -> str:
    """The name to print for a catalogue name or a callable."""
    return value.name if isinstance(value, UserCode) else value
