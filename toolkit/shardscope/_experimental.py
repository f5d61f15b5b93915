"""Decorator for public names that may still change."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Any, TypeVar

Marked = TypeVar("Marked", bound=Callable[..., Any])


def experimental(what: Marked) -> Marked:
    """Add a note to the docstring of a public function or class that it may change; calls emit no warning.

    Example:
        >>> @experimental
        ... def measure() -> int:
        ...     "Return one."
        >>> print(measure.__doc__)
        Return one.
        <BLANKLINE>
        Note:
            Experimental: may change in any minor release, with an entry in the changelog.
    """
    what.__doc__ = (
        f"{cleandoc(what.__doc__ or '')}\n\nNote:\n"
        "    Experimental: may change in any minor release, with an entry in the changelog."
    )
    return what
