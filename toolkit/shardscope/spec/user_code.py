"""A user-defined function in a job: a model, a data set or a loss defined in a script or a notebook cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PrivateAttr

from shardscope.errors import SpecError
from shardscope.spec._base import Spec


class UserCode(Spec):
    """A callable of which only the name is written to JSON.

    The code itself is saved by cloudpickle in a file of the run directory that is private to the user. A `job.json`
    that someone else sends you names the function but cannot run anything.
    """

    name: str
    """The callable's own name, for messages and plots."""
    _function: Callable[..., Any] | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Self:
        """Wrap a callable, under its own name or the given one."""
        code = cls(name=name or getattr(function, "__name__", type(function).__name__))
        code._function = function
        return code

    @property
    def is_here(self) -> bool:
        """Whether the callable itself is loaded, rather than only its name."""
        return self._function is not None

    @property
    def function(self) -> Callable[..., Any]:
        """The callable.

        Raises:
            SpecError: The job was read from JSON, which holds only the name.
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
"""A name from a catalogue, or a user-defined callable."""


def label_of(value: str | UserCode) -> str:
    """Return the display name of a catalogue name or a callable."""
    return value.name if isinstance(value, UserCode) else value
