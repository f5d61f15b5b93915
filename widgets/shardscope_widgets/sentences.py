"""Sentences in notebooks that are computed from the data of the figure beside them."""

from __future__ import annotations

from IPython.display import Markdown, display


def say(text: object) -> None:
    """Display `text` as Markdown below a cell; a dollar sign in it is a dollar, not the start of a formula.

    Example:
        >>> say(figures.links_text(figures.links_info(traces)))  # doctest: +SKIP
    """
    display(Markdown(str(text).replace("$", r"\$")))
