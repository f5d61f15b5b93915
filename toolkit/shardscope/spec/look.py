"""How figures draw a method."""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    """Colour, dash and marker."""

    colour: str
    """As CSS has it."""
    dash: str = "solid"
    """Of lines, as Plotly calls it."""
    symbol: str = "circle"
    """Of points, as Plotly calls it."""


YOUR_OWN = Look("#8a6d3b", "dash", "x")
"""Of methods that do not say."""
