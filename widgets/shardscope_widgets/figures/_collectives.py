"""Bytes that a run sent, by collective, as bars, and the uncompressed total by formula."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.words import bytes_text, plural

Spec = dict[str, Any]


class CollectivesInfo(NamedTuple):
    """Bytes per step summed over ranks, by collective, largest first; `formula` is the uncompressed total."""

    names: tuple[str, ...]
    sent: tuple[float, ...]
    formula: float | None


def collectives_info(sent: Mapping[str, int], steps: int, *, formula: float | None = None) -> CollectivesInfo:
    """Compute the figure's data from bytes by collective, summed over `steps` steps."""
    rows = sorted(
        ((name, size / max(1, steps)) for name, size in sent.items() if size), key=lambda row: -row[1]
    )
    return CollectivesInfo(tuple(n for n, _ in rows), tuple(s for _, s in rows), formula)


def collectives_text(info: CollectivesInfo) -> str:
    """The figure in words."""
    if not info.names:
        return "Nothing was sent."
    told = f"{bytes_text(sum(info.sent))} a step in {plural(len(info.names), 'kind')} of message"
    if info.formula is None:
        return f"{told}."
    times = f"{info.formula / sum(info.sent):.3g} times that"
    return f"{told}; uncompressed, the formula says {bytes_text(info.formula)}, {times}."


def collectives_spec(info: CollectivesInfo) -> Spec:
    """The bars as Plotly's JSON."""
    looks = [theme.span_look(name) for name in info.names]
    bars = {
        "type": "bar", "orientation": "h", "x": list(info.sent), "y": list(info.names),
        "marker": {
            "color": [look.colour for look in looks],
            "pattern": {
                "shape": [look.pattern for look in looks], "fillmode": "overlay", "fgcolor": "rgba(255,255,255,.55)",
                "size": 7, "solidity": 0.14,
            },
        },
        "text": [bytes_text(size) for size in info.sent], "textposition": "outside", "cliponaxis": False,
        "hovertemplate": "%{y}: %{text} a step<extra></extra>",
    }  # fmt: skip
    layout = _layout()
    order = {
        "categoryorder": "array",
        "categoryarray": list(info.names),
    }  # otherwise redrawing keeps the previous run's order
    return {"data": [bars], "layout": layout | {"yaxis": layout["yaxis"] | order}}


def collectives(sent: Mapping[str, int], steps: int) -> go.Figure:
    """Draw the bytes per step that a run sent, by collective."""
    return go.Figure(collectives_spec(collectives_info(sent, steps)))


@cache
def _layout() -> Spec:
    look = theme.look(height=210, margin={"l": 8, "r": 70, "t": 8, "b": 8}, showlegend=False)
    rows = {"autorange": "reversed", "showgrid": False, "automargin": True, "ticklabelstandoff": 5}
    return look | {
        "xaxis": theme.axis(
            "bytes a step, all ranks", rangemode="tozero", nticks=4, exponentformat="SI", ticksuffix="B"
        ),
        "yaxis": rows,
    }
