"""A Plotly figure that is given whole new values again and again, and survives a reload of the page.

Plotly's own FigureWidget carries the 5 MB library in its module, and anywidget drops every message to a model whose
module has not loaded within 2 seconds: on a busy machine such a figure stays as it was for good. Here the module is a
few lines, and the library is a model of its own that all figures of a kernel share and each page loads once. The figure
is one trait, so the newest value wins, the last one always arrives, and a reloaded page shows what is shown now.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import anywidget
import plotly.graph_objects as go
import traitlets as t
from ipywidgets import widget_serialization
from plotly.offline import get_plotlyjs


class Library(anywidget.AnyWidget):
    """Plotly's script, as text."""

    _esm = "export default {};"
    code = t.Unicode("").tag(sync=True)


@cache
def _library() -> Library:
    return Library(code=get_plotlyjs())


class LiveFigure(anywidget.AnyWidget):
    """A figure with places for traces, of which `put` fills the first; or any figure, by `show`."""

    _esm = files(__package__).joinpath("live_figure.js").read_text(encoding="utf-8")
    library = t.Instance(Library).tag(sync=True, **widget_serialization)
    figure = t.Dict(help="Data and layout, as Plotly's JSON.").tag(sync=True)
    label = t.Unicode(help="What a screen reader calls the figure.").tag(sync=True)

    def __init__(self, template: go.Figure, *, label: str = "") -> None:
        self._template = template.to_plotly_json()
        shown = {"data": [], "layout": self._template["layout"]}
        super().__init__(library=_library(), figure=shown, label=label)

    def put(self, traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> None:
        """Show `traces`, each on the axes of its place, under the template's layout with `layout` on top."""
        places = self._template["data"]
        data = [place | trace for place, trace in zip(places, traces, strict=False)]
        self.figure = {"data": data, "layout": _on_top(self._template["layout"], layout)}

    def show_parts(self, traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> None:
        """Show whole traces, as many as there are, under the template's layout with `layout` on top."""
        self.figure = {"data": list(traces), "layout": _on_top(self._template["layout"], layout)}

    def show(self, figure: go.Figure) -> None:
        """Show a whole figure in place of the template and what was put into it."""
        whole = figure.to_plotly_json()
        self.figure = {"data": whole["data"], "layout": whole["layout"]}

    @property
    def traces(self) -> list[dict[str, Any]]:
        """The traces that are shown."""
        return list(self.figure["data"])

    def snapshot(self) -> go.Figure:
        """What is shown now, as a plain figure."""
        return go.Figure(self.figure)


def _on_top(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`: settings of one axis are merged, everything else is replaced."""
    merged = {
        name: below.get(name, {}) | value if isinstance(value, dict) else value
        for name, value in above.items()
    }
    return below | merged
