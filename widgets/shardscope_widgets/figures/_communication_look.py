"""Shared parts of the communication calculator's figures: a line style for each algorithm, axes, headings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import plotly.graph_objects as go

from shardscope.analytic.communication import ALGORITHMS
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._communication import MOST_WORKERS, Floats
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.words import duration_text

HEIGHT = 430
_GAP = 0.12
HALVES = ([0.0, 0.5 - _GAP / 2], [0.5 + _GAP / 2, 1.0])

# The algorithms ticked at first differ in dash, not only in colour.
LOOKS = {
    "parameter-server": RunStyle(theme.strategy_colour("parameter-server"), "dashdot"),
    "byteps": RunStyle("#7d4f9e", "dash"),
    "ring": RunStyle(theme.strategy_colour("ring")),
    "bidirectional-ring": RunStyle("#f0a43a", "dash"),
    "chain": RunStyle("#a35a3a", "dot"),
    "tree": RunStyle(theme.strategy_colour("tree"), "longdash"),
    "pipelined-tree": RunStyle("#62b84f", "longdash"),
    "double-binary-tree": RunStyle("#1a6c79", "dot"),
    "halving-doubling": RunStyle("#2a86d1", "dash"),
    "recursive-doubling": RunStyle("#62bfcb", "dot"),
    "hierarchical": RunStyle(theme.strategy_colour("hierarchical"), "dot"),
    "torus-2d": RunStyle("#8f97ea", "dashdot"),
    "in-network": RunStyle("#d6457f", "dash"),
    "nvls": RunStyle("#8b8f99", "dot"),
    "optical-ring": RunStyle("#c49a0c", "longdashdot"),
    "scatter-all-gather": RunStyle("#2a86d1", "dash"),
    "pairwise": RunStyle(theme.strategy_colour("ring"), "solid"),
    "bruck": RunStyle(theme.strategy_colour("tree"), "longdash"),
    "direct": RunStyle("#8b8f99", "dot"),
}


def title(name: str) -> str:
    """Return the name of an algorithm for legends."""
    return ALGORITHMS[name].title


def log_ticks(low: float, high: float, text: Callable[[float], str], *, most: int = 6) -> dict[str, Any]:
    """Return settings of a logarithmic axis from `low` to `high`, with tick labels formatted by `text`.

    An axis of at most two decades has ticks at 1, 2 and 5 in each decade; a longer axis has ticks at powers of ten
    only, and beyond `most` decades only at every second, third, ... power of ten.
    """
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    parts: tuple[int, ...] = (1, 2, 5) if last - first <= 2 else (1,)
    step = max(1, -(-(last - first) // most))
    values = [part * 10.0**k for k in range(first, last + 1, step) for part in parts]
    shown = [value for value in values if low * 0.999 <= value <= high * 1.001]
    return {"type": "log", "tickvals": shown, "ticktext": [text(value) for value in shown], "tickangle": 0}


def tick_seconds(seconds: float) -> str:
    """Format seconds as `duration_text` does, but without minutes: ``1,000 s``."""
    return duration_text(seconds) if seconds < 60 else f"{seconds:,.0f} s"


def worker_ticks(workers: int) -> dict[str, Any]:
    """Return settings of the worker axis: a tick at every second power of two, up to `MOST_WORKERS` or `workers`."""
    last = max(MOST_WORKERS, workers)
    shown = [2**k for k in range(1, last.bit_length(), 2)]
    text = [f"{count:,}" for count in shown]
    ends = [0.27, float(np.log10(last)) + 0.04]
    return {"type": "log", "tickvals": shown, "ticktext": text, "tickangle": 0, "range": ends}


def line_trace(algorithm: str, x: Floats, y: Floats, axis: str, **more: Any) -> dict[str, Any]:
    """Return the line of an algorithm in the plot with this x-axis."""
    look = LOOKS[algorithm]
    return {
        "type": "scatter", "mode": "lines", "name": title(algorithm), "legendgroup": algorithm,
        "showlegend": axis == "x", "x": x.tolist(), "y": y.tolist(), "xaxis": axis, "yaxis": axis.replace("x", "y"),
        "line": {"color": look.colour, "dash": look.dash, "width": 2.4}, "zorder": look.zorder, **more,
    }  # fmt: skip


def here_line(place: float, axis: str) -> dict[str, Any]:
    """Return a vertical line at `place`, the current value of the controls; `axis` is the suffix of the axes' names."""
    return theme.rule(theme.AXIS, x=place, axis=axis, along=f"y{axis} domain", width=1, dash="dot")


def heading(text: str, x: float) -> dict[str, Any]:
    """Return the heading of one of the two plots, starting at `x`."""
    return theme.note(f"<b>{text}</b>", x=x, y=1.01)


def wrapped(text: str, width: int) -> str:
    """Wrap text at `width` characters with ``<br>``, for hover labels."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines)


def template() -> go.Figure:
    """Return an empty figure with the common style."""
    return theme.style(go.Figure(), height=HEIGHT, legend=theme.LEGEND_ABOVE, margin_t=76)


def drawn(traces: list[dict[str, Any]], layout: dict[str, Any]) -> go.Figure:
    """Return a standalone figure with a legend."""
    return template().add_traces(traces).update_layout(**layout)
