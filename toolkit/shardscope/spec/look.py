"""How figures draw a method."""

from __future__ import annotations

from typing import NamedTuple

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Of lines, as Plotly calls them."""


class Look(NamedTuple):
    """Colour, dash and marker."""

    colour: str
    """As CSS has it."""
    dash: str = "solid"
    """One of `DASHES`."""
    symbol: str = "circle"
    """Of points, as Plotly calls it."""


YOUR_OWN = Look("#8a6d3b", "dash", "x")
"""Of methods that do not say."""
