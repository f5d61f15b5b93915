"""The values and the caption of any figure, from the arguments of the function that draws it.

The module of a figure ``links`` has three functions: ``links_info`` computes plain values, ``links`` draws them, and
``links_text`` puts them into words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from shardscope.errors import SpecError


def info(figure: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Return the plain values that a figure draws, as a named tuple.

    Args:
        figure: A function of this package, such as `links`.
        arguments: Positional arguments of the figure, such as the runs to draw.
        settings: Keyword arguments of the figure.

    Raises:
        SpecError: The figure has no values apart from its arguments.

    Example:
        >>> figures.info(figures.links, traces).runs[0].most  # doctest: +SKIP
    """
    values = _half(figure, "info_of_run") or _half(figure, "info")
    if values is None:
        raise SpecError(
            f"figures.{figure.__name__} has no values of its own; draw it: figures.{figure.__name__}(...)"
        )
    return values(*arguments, **settings)


def caption(figure: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    """Return what a figure shows, in words.

    Args:
        figure: A function of this package, such as `links`.
        arguments: Positional arguments of the figure, such as the runs to draw.
        settings: Keyword arguments of the figure.

    Raises:
        SpecError: The figure has no caption.

    Example:
        >>> say(figures.caption(figures.links, traces))  # doctest: +SKIP
    """
    text = _half(figure, "text")
    if text is None:
        raise SpecError(f"figures.{figure.__name__} has no caption; draw it: figures.{figure.__name__}(...)")
    return str(text(info(figure, *arguments, **settings)))


def _half(figure: Callable[..., Any], half: str) -> Callable[..., Any] | None:
    """Return a function from the module of a figure or from the module of its values; None if there is none."""
    name, module = figure.__name__, sys.modules[figure.__module__]
    values = getattr(module, f"{name}_info", module)
    for home in (module, sys.modules[getattr(values, "__module__", figure.__module__)]):
        if found := getattr(home, f"{name}_{half}", None):
            return found  # type: ignore[no-any-return]
    return None
