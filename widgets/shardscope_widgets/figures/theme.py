"""The common style of all figures: transparent background, greys for light and dark themes, a colour per strategy.

Colours come from the palettes of Okabe and Ito (2008) and of Paul Tol, which remain distinguishable with common forms
of colour blindness. Colour is never the only cue: runs also differ in dash and marker, spans in pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.axes import axis_of, collective_of
from shardscope.spec import Compression, registry, run_names
from shardscope.spec.look import DASHES, MethodStyle
from shardscope.spec.run_names import strategy_colour

if TYPE_CHECKING:
    from shardscope_widgets.trace import Trace

__all__ = [
    "AXIS", "AXIS_COLOURS", "DASHES", "FONT", "GREY", "GRID", "HOVER", "IDLE", "LEGEND_ABOVE", "MEMORY_LOOKS",
    "MODEBAR", "MODEBAR_WIDTH", "OP_LOOKS", "PATTERNS", "RunStyle", "SPAN_LOOKS", "axis", "axis_colour", "blank",
    "empty", "heading", "ink_on", "look", "method_look", "note", "rule", "run_looks", "span_look",
    "strategy_colour", "striped", "style", "tint",
]  # fmt: skip
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
GREY = "#757a83"
"""Colour of text and lines: contrast of at least 4.3:1 on white and nearly black pages; labs override it for text."""
GRID = "rgba(127,132,141,0.22)"
AXIS = "rgba(127,132,141,0.55)"
HOVER = "#262a31"

PATTERNS = ("", "/", ".", "x", "-", "\\")
LEGEND_ABOVE = {
    "orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0, "xref": "container",
    "xanchor": "left", "traceorder": "normal",
}  # fmt: skip
"""Settings of a horizontal legend at the top of the figure, above the headings of the plots."""
MODEBAR = {
    "orientation": "v", "bgcolor": "rgba(0,0,0,0)",
    "remove": [
        "sendChartToCloud", "select2d", "lasso2d", "autoScale2d", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d",
    ],
}  # fmt: skip
"""Settings of Plotly's buttons. Some are removed, especially the upload to Plotly's cloud; the remaining buttons form a
column on the right, next to the legend. Dragging zooms in, and a double click zooms out. These settings are part of
each figure's layout, which every renderer respects."""


MODEBAR_WIDTH = 34
"""Width in pixels of the column of buttons. Every figure leaves this margin at its right, to keep its plots clear."""


class RunStyle(NamedTuple):
    """Style of one run or span kind: a colour, plus a dash or pattern that identifies it without colour."""

    colour: str
    dash: str = "solid"
    pattern: str = ""

    @property
    def zorder(self) -> int:
        """Drawing order: dashed lines lie above solid lines, so that two coinciding curves are both visible."""
        return DASHES.index(self.dash)


SPAN_LOOKS = {
    "forward": RunStyle("#5aa9e6"),
    "backward": RunStyle("#2a6fb5"),
    "recompute": RunStyle("#88b9d8", pattern="."),
    "optimizer": RunStyle("#11997a"),
    "clip": RunStyle("#7bbf9e"),
    "data": RunStyle("#a7abb4"),
    "all_reduce": RunStyle("#f0a43a", pattern="/"),
    "ring_all_reduce": RunStyle("#e06c2c", pattern="/"),
    "ring_reduce_scatter": RunStyle("#e06c2c", pattern="/"),
    "ring_all_gather": RunStyle("#f4b183", pattern="\\"),
    "broadcast": RunStyle("#b866a6", pattern="x"),
    "encode": RunStyle("#c49a0c"),
    "decode": RunStyle("#e3c65a", pattern="."),
    "packet_all_to_all": RunStyle("#e06c2c", pattern="x"),
    "packet_all_gather": RunStyle("#f4b183", pattern="."),
    "agreement": RunStyle("#8b8f99", pattern="."),
    "send": RunStyle("#c49a0c", pattern="-"),
    "recv": RunStyle("#d9c36a", pattern="-"),
}
MEMORY_LOOKS = {
    "parameters": RunStyle("#2a6fb5"),
    "gradients": RunStyle("#e06c2c", pattern="/"),
    "optimizer": RunStyle("#11997a"),
    "activations": RunStyle("#c98fbf", pattern="."),
    "gathered": RunStyle("#7db8e8", pattern="\\"),
    "buffers": RunStyle("#8b8f99", pattern="x"),
}
"""Styles by type of memory; gathered parameters are a lighter blue than a rank's own parameters."""
AXIS_COLOURS = {
    "data": "#e06c2c", "tensor": "#b866a6", "pipeline": "#c49a0c", "context": "#3aa5b5", "expert": "#5f6fd6",
}  # fmt: skip
"""Colours of collectives by the axis of the ranks, in jobs with several axes; the collective decides the pattern."""
OP_LOOKS = {
    "F": RunStyle("#5aa9e6"),
    "B": RunStyle("#2a5f9e"),
    "I": RunStyle("#e08a3c"),
    "W": RunStyle("#8fce9f", pattern="/"),
}
"""Styles by pipeline operation; they also differ in brightness."""
IDLE = RunStyle("rgba(127,132,141,0.2)")
_SPARE_SPANS = ("#b866a6", "#c49a0c", "#5f6fd6", "#4fb3bf", "#a35a3a")


def span_look(name: str) -> RunStyle:
    """Return the style of a span kind; an unknown kind gets a spare colour derived from its name.

    A collective on an axis has the axis's colour and its own pattern.
    """
    if (axis := axis_of(name)) is not None:
        return RunStyle(axis_colour(axis), pattern=span_look(collective_of(name)).pattern)
    return SPAN_LOOKS.get(name) or RunStyle(_spare(name), pattern="/")


def axis_colour(axis: str) -> str:
    """Return the colour of an axis; one that has none gets a spare colour derived from its name."""
    return AXIS_COLOURS.get(axis) or _spare(axis)


def _spare(name: str) -> str:
    return _SPARE_SPANS[sum(map(ord, name)) % len(_SPARE_SPANS)]


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def tint(colour: str, part: float) -> str:
    """Mix a hexadecimal colour with white: `part` 0 leaves it unchanged, 1 gives white."""
    return "#" + "".join(f"{round(value + (255 - value) * part):02x}" for value in _rgb(colour))


def ink_on(colour: str) -> str:
    """Return near-black or white, whichever contrasts more with a hexadecimal colour (WCAG 2.2 relative luminance)."""
    linear = [
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in _rgb(colour))
    ]
    light = sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#10151b" if (light + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def run_looks(traces: Sequence[Trace]) -> list[RunStyle]:
    """Return one style per run: its strategy's colour if few runs share a strategy, else a distinct colour per run.

    A run that a lab has given a look keeps it. See `shardscope.spec.run_names.run_looks`.
    """
    looks = run_names.run_looks([trace.strategy for trace in traces], [trace.look for trace in traces])
    return [RunStyle(look.colour, DASHES[look.place], PATTERNS[look.place]) for look in looks]


def method_look(name: str) -> MethodStyle:
    """Return the plot style of a compression method; an unknown method gets a spare colour derived from its name.

    A family of methods shares a hue; its methods differ in brightness, dash and marker.
    """
    method = registry.find(Compression, name)
    return method.look if method else MethodStyle(strategy_colour(name), "dash", "x")


def axis(title: str = "", **settings: Any) -> dict[str, Any]:
    """Return settings of one axis in the common style."""
    look = {
        "title": {"text": title, "standoff": 6, "font": {"size": 12}},
        "gridcolor": GRID,
        "linecolor": AXIS,
        "zeroline": False,
        "ticks": "",
        "automargin": True,
    }
    return look | settings


def look(*, height: int, head: int | None = None, **layout: Any) -> dict[str, Any]:
    """Return the layout of the common style, overridden by `layout`.

    Args:
        height: Height in pixels.
        head: Space above the plots in pixels, with the legend at the top of the figure; None for the usual legend.
        layout: Settings of Plotly's layout.
    """
    common: dict[str, Any] = {
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": GREY},
        "margin": {"l": 8, "r": 12, "t": 36, "b": 8},
        "hoverlabel": {"bgcolor": HOVER, "bordercolor": HOVER, "font": {"color": "#f4f5f7", "family": FONT}},
        "legend": {
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.02,
            "x": 0,
            "xanchor": "left",
            "title": {"text": ""},
        },
        "hovermode": "closest",
        "bargap": 0.25,
        "uirevision": "keep",
        "modebar": MODEBAR,
        "annotationdefaults": {"arrowcolor": GREY},
    }
    if head is not None:
        common |= {"legend": LEGEND_ABOVE, "margin": {"l": 8, "r": 12, "t": head, "b": 8}}
    settings = common | layout
    margin = settings["margin"]
    return settings | {"margin": margin | {"r": max(margin.get("r", 0), MODEBAR_WIDTH)}}


def style(figure: go.Figure, *, height: int, **layout: Any) -> go.Figure:
    """Apply the common style to `figure` and return it; the settings are those of `look`."""
    return figure.update_layout(**look(height=height, **layout))


def blank() -> go.Figure:
    """Return an empty figure with a transparent background, for a live figure that has no data yet."""
    return go.Figure(layout=look(height=40, xaxis={"visible": False}, yaxis={"visible": False}))


def empty(text: str) -> dict[str, Any]:
    """Return layout overrides that show `text` in a figure with one pair of axes and no data yet."""
    bare: dict[str, Any] = {"showticklabels": False, "showgrid": False, "range": [0, 1], "type": "linear"}
    centre = {"x": 0.5, "y": 0.5, "xanchor": "center", "yanchor": "middle"}
    return {
        "xaxis": axis(**bare), "yaxis": axis(**bare), "annotations": [note(text, x=0.5, y=0.5) | centre]
    }  # fmt: skip


def striped(look: RunStyle, *, white: float = 0.55, **pattern: Any) -> dict[str, Any]:
    """Return the marker of bars: the colour of `look`, and its pattern in translucent white."""
    stripes = {"shape": look.pattern, "fgcolor": f"rgba(255,255,255,{white})"}
    return {"color": look.colour, "pattern": stripes | pattern}


def ghost_key() -> dict[str, Any]:
    """Return a trace without data whose legend entry explains that fainter bars are predicted."""
    return {
        "type": "bar", "x": [None], "y": [None], "name": "predicted", "opacity": 0.45, "marker": {"color": GREY},
        "hoverinfo": "skip",
    }  # fmt: skip


def rule(
    colour: str, *, x: float | None = None, y: float | None = None, axis: str = "", along: str = "paper",
    width: float = 1.6, dash: str = "dash",
) -> dict[str, Any]:  # fmt: skip
    """Return a line across a plot as a shape: vertical at `x`, or horizontal at `y`.

    Args:
        colour: Colour of the line.
        x: Position of a vertical line.
        y: Position of a horizontal line.
        axis: Suffix of the name of the axis that `x` or `y` refers to.
        along: Plotly reference of the other coordinate, such as ``paper``; the line spans its whole range.
        width: Width in pixels.
        dash: Plotly's name of the dash style.
    """
    (one, place), other = (("x", x), "y") if y is None else (("y", y), "x")
    return {
        "type": "line", "line": {"color": colour, "width": width, "dash": dash}, f"{one}ref": f"{one}{axis}",
        f"{one}0": place, f"{one}1": place, f"{other}ref": along, f"{other}0": 0, f"{other}1": 1,
    }  # fmt: skip


def note(text: str, *, x: float, y: float) -> dict[str, Any]:
    """Return an annotation: a left-aligned line of text at (`x`, `y`), as fractions of the plot area."""
    return {
        "text": text,
        "x": x,
        "y": y,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 13, "color": GREY},
    }


def heading(title: str, about: str, *, x: float) -> dict[str, Any]:
    """Return an annotation above the plot that begins at `x`: a title, and a few words below the title."""
    text = f"<b>{title}</b><br><span style='font-size:11px'>{about}</span>"
    return note(text, x=x, y=1) | {"yshift": 6, "align": "left"}
