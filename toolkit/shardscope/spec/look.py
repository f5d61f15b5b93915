"""Colours, line dashes and markers of methods in plots, and how drawings arrange the ranks of a strategy."""

from __future__ import annotations

from typing import Literal, NamedTuple

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Line dashes, by their Plotly names."""


class MethodStyle(NamedTuple):
    """Colour, dash and marker of a method in plots."""

    colour: str
    """CSS colour."""
    dash: str = "solid"
    """Line dash, one of `DASHES`."""
    symbol: str = "circle"
    """Marker symbol, by its Plotly name."""


YOUR_OWN = MethodStyle("#8a6d3b", "dash", "x")
"""Default style, for methods that do not define one."""


class Arrangement(NamedTuple):
    """How the ranks of a strategy are connected, for drawings."""

    shape: Literal["ring", "tree", "star", "row", "grid"] = "ring"
    """``ring``: a circle; ``tree``: binary, rank 0 on top; ``star``: `hubs` in the middle; ``row``: a line; ``grid``: a
    grid with the ranks along the innermost axis next to each other."""
    hubs: tuple[int, ...] = ()
    """Ranks in the middle of a star."""
    axes: tuple[tuple[str, int], ...] = ()
    """Name and number of ranks of each axis of a mesh, the outermost axis first."""
