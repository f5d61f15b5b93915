"""A bar chart of the bytes that a run sent by collective, and the uncompressed total according to the formula."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.words import bytes_text, plural

Spec = dict[str, Any]


class CollectivesInfo(NamedTuple):
    """Bytes per step, summed over ranks, by collective, largest first.

    `formula` is the total without compression according to the formula; None if unknown.
    """

    names: tuple[str, ...]
    sent: tuple[float, ...]
    formula: float | None


def collectives_info(sent: Mapping[str, int], steps: int, *, formula: float | None = None) -> CollectivesInfo:
    """Return the bytes per step by collective, from the totals of several steps.

    Args:
        sent: Bytes sent by all ranks over `steps` steps, by collective.
        steps: Number of steps.
        formula: Bytes per step without compression; None if unknown.
    """
    rows = sorted(
        ((name, size / max(1, steps)) for name, size in sent.items() if size), key=lambda row: -row[1]
    )
    return CollectivesInfo(tuple(n for n, _ in rows), tuple(s for _, s in rows), formula)


def collectives_text(info: CollectivesInfo) -> str:
    """Return a sentence with the bytes sent per step, and the uncompressed bytes according to the formula."""
    if not info.names:
        return "Nothing was sent."
    told = f"{bytes_text(sum(info.sent))} per step in {plural(len(info.names), 'kind')} of message"
    if info.formula is None:
        return f"{told}."
    times = f"{info.formula / sum(info.sent):.3g} times as much"
    return f"{told}; the formula gives {bytes_text(info.formula)} without compression, {times}."


def collectives_spec(info: CollectivesInfo) -> Spec:
    """Return the bars as Plotly JSON."""
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
        "hovertemplate": "%{y}: %{text} per step<extra></extra>",
    }  # fmt: skip
    layout = _layout()
    order = {
        "categoryorder": "array",
        "categoryarray": list(info.names),
    }  # without it, a redraw keeps the order of the previous run
    return {"data": [bars], "layout": layout | {"yaxis": layout["yaxis"] | order}}


def collectives(sent: Mapping[str, int], steps: int) -> go.Figure:
    """Draw the bytes that a run sent per step, by collective; `sent` is the total over `steps` steps."""
    return go.Figure(collectives_spec(collectives_info(sent, steps)))


@cache
def _layout() -> Spec:
    look = theme.look(height=210, margin={"l": 8, "r": 70, "t": 8, "b": 8}, showlegend=False)
    rows = {"autorange": "reversed", "showgrid": False, "automargin": True, "ticklabelstandoff": 5}
    return look | {
        "xaxis": theme.axis(
            "bytes per step, all ranks", rangemode="tozero", nticks=4, tickformat="~s", ticksuffix="B"
        ),
        "yaxis": rows,
    }
