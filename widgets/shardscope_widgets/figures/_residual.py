"""Waterfall from the expected to the measured time of a step: one bar for the difference of each term."""

from __future__ import annotations

from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.measure.compare.comparison import Comparison
from shardscope.measure.compare.residual import Expected, Residual
from shardscope_widgets.figures import theme
from shardscope_widgets.words import collective_text, duration_text

_ROW, _FRAME = 32, 58
_LONGER, _SHORTER = theme.RunStyle("#c8553d", pattern="/"), theme.RunStyle("#11997a", pattern="\\")
_TOTALS = {"predicted": "#c9a227", "simulated": "#11997a", "measured": "#2a6fb5"}
_NEGLIGIBLE = 0.015
"""Difference of a term, relative to the measured step, below which it is merged with other small terms."""
OTHERS = "all other terms"


class ResidualBar(NamedTuple):
    """One bar: its label, where it starts and ends in milliseconds, and its text."""

    label: str
    start_ms: float
    end_ms: float
    text: str
    colour: str
    pattern: str = ""


class ResidualInfo(NamedTuple):
    """The bars from top to bottom: the expected step, the differences, and the measured step."""

    bars: tuple[ResidualBar, ...]
    sentence: str


def residual_info(residual: Residual) -> ResidualInfo:
    """Return the bars; terms with a negligible difference are merged into one bar, which is omitted below 1 µs."""
    bars = [
        ResidualBar(
            f"{residual.expected} {residual.per}", 0.0, residual.expected_s * 1e3, duration_text(residual.expected_s),
            _TOTALS[residual.expected],
        )
    ]  # fmt: skip
    at, small = residual.expected_s, 0.0
    for term in residual.terms:
        if abs(term.difference_s) < _NEGLIGIBLE * residual.measured_s:
            small += term.difference_s
            continue
        bars.append(_step(collective_text(term.term), at, term.difference_s))
        at += term.difference_s
    if abs(small) >= 1e-6:
        bars.append(_step(OTHERS, at, small))
    bars.append(
        ResidualBar(
            f"measured {residual.per}", 0.0, residual.measured_s * 1e3, duration_text(residual.measured_s),
            _TOTALS["measured"],
        )
    )  # fmt: skip
    return ResidualInfo(tuple(bars), residual.sentence)


def _step(label: str, at_s: float, more_s: float) -> ResidualBar:
    look = _LONGER if more_s > 0 else _SHORTER
    text = f"{'+' if more_s > 0 else '-'}{duration_text(abs(more_s))}"
    return ResidualBar(label, at_s * 1e3, (at_s + more_s) * 1e3, text, look.colour, look.pattern)


def residual_parts(info: ResidualInfo) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return traces and layout of the waterfall as Plotly JSON."""
    bars, labels = info.bars, [bar.label for bar in info.bars]
    low, high = _window(info)
    trace = {
        "type": "bar", "orientation": "h", "y": labels, "width": 0.66,
        "base": [max(min(bar.start_ms, bar.end_ms), low) for bar in bars],
        "x": [max(bar.start_ms, bar.end_ms) - max(min(bar.start_ms, bar.end_ms), low) for bar in bars],
        "marker": {
            "color": [bar.colour for bar in bars], "line": {"width": 0},
            "pattern": {
                "shape": [bar.pattern for bar in bars], "fgcolor": "rgba(255,255,255,0.55)",
                "size": 5, "solidity": 0.25,
            },
        },
        "text": [f" {bar.text}" for bar in bars], "textposition": "outside", "cliponaxis": False,
        "textfont": {"size": 12, "color": theme.GREY},
        "hovertemplate": "<b>%{y}</b>:%{text}<extra></extra>", "showlegend": False,
    }  # fmt: skip
    links = [
        {
            "type": "line", "xref": "x", "yref": "y", "x0": bar.end_ms, "x1": bar.end_ms, "y0": k, "y1": k + 1,
            "line": {"color": theme.AXIS, "width": 1, "dash": "dot"}, "layer": "below",
        }
        for k, bar in enumerate(bars[:-1])
    ]  # fmt: skip
    layout = {
        "height": _FRAME + _ROW * len(bars), "shapes": links, "showlegend": False,
        "xaxis": theme.axis("milliseconds", range=[low, high], nticks=6),
        "yaxis": theme.axis(
            range=[len(bars) - 0.5, -0.5], type="category", showgrid=False, fixedrange=True, ticklabelstandoff=6
        ),
    }  # fmt: skip
    return [trace], layout


def _window(info: ResidualInfo) -> tuple[float, float]:
    """Return the range of the time axis, which starts at 0 unless the differences are small relative to the step."""
    ends = [end for bar in info.bars for end in (bar.end_ms, bar.start_ms) if end]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    room = 0.2 * (high if low < high * 0.6 else high - low)
    return (0.0 if low < high * 0.6 else max(0.0, low - (high - low)), high + max(room, 0.02 * high))


def empty_residual() -> go.Figure:
    """Return the waterfall without bars, as the template of a live figure."""
    return theme.style(go.Figure(), height=_FRAME + _ROW, margin={"l": 8, "r": 12, "t": 8, "b": 8})


def draw_residual(info: ResidualInfo) -> go.Figure:
    """Draw the figure for `info`."""
    traces, layout = residual_parts(info)
    figure = empty_residual()
    figure.add_traces(traces)
    return figure.update_layout(layout)


def residual(comparison: Comparison, expected: Expected = "predicted") -> go.Figure | None:
    """Draw the terms that explain the difference in step time; None if the comparison has no breakdown of a step.

    Example:
        >>> residual(ss.compare(run), "simulated")  # doctest: +SKIP
    """
    found = comparison.residual(expected)
    return None if found is None else draw_residual(residual_info(found))
