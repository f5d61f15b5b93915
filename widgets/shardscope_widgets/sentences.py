"""Sentences in notebooks that are computed from the data of the figure next to them."""

from __future__ import annotations

import re

from IPython.display import Markdown, display

_CODE_OR_DOLLAR = re.compile(r"`[^`]*`|\$")
_DOLLAR = r"<span>\$</span>"
"""A dollar sign in its own element; Jupyter drops a backslash, and renders text between two dollars as a formula."""


def say(text: object) -> None:
    """Display `text` as Markdown below a cell, with each dollar sign shown literally, not as the start of a formula.

    Example:
        >>> say(figures.caption(figures.links, traces))  # doctest: +SKIP
    """
    display(
        Markdown(_CODE_OR_DOLLAR.sub(lambda found: found[0] if len(found[0]) > 1 else _DOLLAR, str(text)))
    )
