"""The look of a method in plots."""

from __future__ import annotations

from typing import NamedTuple

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Dashes of lines, by their Plotly names."""


class MethodStyle(NamedTuple):
    """Colour, dash and marker of a method in plots."""

    colour: str
    """CSS colour."""
    dash: str = "solid"
    """Line dash, one of `DASHES`."""
    symbol: str = "circle"
    """Marker symbol, by its Plotly name."""


YOUR_OWN = MethodStyle("#8a6d3b", "dash", "x")
"""The default look, for methods that do not define one."""
