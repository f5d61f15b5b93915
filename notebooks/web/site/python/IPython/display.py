"""Stand-in for `IPython.display`: in the page, widgets are shown by the page, not by cells."""

from __future__ import annotations

from typing import Any


class HTML:
    """A string of HTML."""

    def __init__(self, data: str = "", **_settings: Any) -> None:
        self.data = data


def display(*_values: Any, **_settings: Any) -> None:
    """Show nothing: there is no cell to show it in."""


def update_display(*_values: Any, **_settings: Any) -> None:
    """Show nothing: there is no cell to show it in."""


def clear_output(**_settings: Any) -> None:
    """Clear nothing: there is no cell to clear."""
