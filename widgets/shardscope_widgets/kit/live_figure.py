"""A Plotly figure that is replaced as a whole at each update, and survives a reload of the page.

The module of Plotly's own FigureWidget contains the 5 MB library, and anywidget drops every message to a model whose
module has not loaded within 2 seconds. On a busy machine a FigureWidget may therefore stop updating. The module of a
`LiveFigure` is a few lines long; the library is a separate model that all figures of a kernel share and that each page
loads once.
The figure is a single trait, so the newest value always arrives, and a reloaded page shows the current figure.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from gzip import compress
from importlib.resources import files
from typing import Any

import anywidget
import plotly.graph_objects as go
import traitlets as t
from ipywidgets import widget_serialization
from plotly.offline import get_plotlyjs

from shardscope_widgets.kit.svg import figure_svg


class Library(anywidget.AnyWidget):
    """Plotly's script, with buttons that save images: compressed, because executed notebooks store it."""

    _esm = "export default {};"
    packed = t.Unicode("", help="The script, compressed by gzip, in base64.").tag(sync=True)


def library_code() -> str:
    """Return Plotly's script with the buttons that save images, compressed by gzip, in base64."""
    ours = files(__package__).joinpath("images.js").read_text(encoding="utf-8")
    code = f"{get_plotlyjs()}\n{ours.replace('export function', 'module.exports.figureConfig = function')}"
    return b64encode(compress(code.encode(), 1)).decode()


@cache
def _library() -> Library:
    return Library(packed=library_code())


class LiveFigure(anywidget.AnyWidget):
    """A live figure: `put` updates the traces of its template, `show` replaces the whole figure.

    Args:
        template: Figure whose traces and layout `put` updates; only its layout is shown at first.
        label: Name of the figure for screen readers.
    """

    _esm = files(__package__).joinpath("live_figure.js").read_text(encoding="utf-8")
    library = t.Instance(Library).tag(sync=True, **widget_serialization)
    figure = t.Dict(help="Data and layout as Plotly JSON.").tag(sync=True)
    label = t.Unicode(help="Name of the figure for screen readers.").tag(sync=True)

    def __init__(self, template: go.Figure, *, label: str = "") -> None:
        self._template = template.to_plotly_json()
        shown = {"data": [], "layout": self._template["layout"]}
        super().__init__(library=_library(), figure=shown, label=label)

    def put(
        self, traces: Sequence[dict[str, Any]], layout: dict[str, Any], more: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Show `traces` and `layout`, merged over the template's traces of the same index and over its layout.

        Args:
            traces: Properties of the template's first traces.
            layout: Changes of the template's layout.
            more: Complete traces to show in addition.
        """
        places = self._template["data"]
        data = [place | trace for place, trace in zip(places, traces, strict=False)]
        self.figure = {"data": [*data, *more], "layout": _on_top(self._template["layout"], layout)}

    def show_parts(self, traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> None:
        """Show any number of complete traces, with `layout` merged over the template's layout."""
        self.figure = {"data": list(traces), "layout": _on_top(self._template["layout"], layout)}

    def show(self, figure: go.Figure) -> None:
        """Show a complete figure, without the template."""
        whole = figure.to_plotly_json()
        self.figure = {"data": whole["data"], "layout": whole["layout"]}

    def svg(self) -> str:
        """Return the figure as an SVG document; empty if it has no traces."""
        return figure_svg(self.figure, label=self.label) if self.figure["data"] else ""

    @property
    def traces(self) -> list[dict[str, Any]]:
        """The traces currently shown."""
        return list(self.figure["data"])


def _on_top(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge `above` over `below`. Dictionaries, such as axes, are merged one level deep; other values are replaced."""
    merged = {
        name: below.get(name, {}) | value if isinstance(value, dict) else value
        for name, value in above.items()
    }
    return below | merged
