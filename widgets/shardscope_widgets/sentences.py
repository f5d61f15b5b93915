"""Sentences in notebooks that are computed from the data of the figure next to them."""

from __future__ import annotations

import re

from IPython.display import Markdown, display

_CODE_OR_DOLLAR = re.compile(r"`[^`]*`|\$")
_DOLLAR = r"<span>\$</span>"
"""A dollar sign in an element of its own: Jupyter drops the backslash, and takes two dollars in a row for a formula."""


def say(text: object) -> None:
    """Display `text` as Markdown below a cell; a dollar sign in it is a dollar, not the start of a formula.

    Example:
        >>> say(figures.caption(figures.links, traces))  # doctest: +SKIP
    """
    display(
        Markdown(_CODE_OR_DOLLAR.sub(lambda found: found[0] if len(found[0]) > 1 else _DOLLAR, str(text)))
    )
