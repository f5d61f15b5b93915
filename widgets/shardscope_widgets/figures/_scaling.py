"""Step time and efficiency by number of workers: measured points, and lines for formula and simulator."""

from __future__ import annotations

from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.measure.scaling.result import Scaling
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._communication_look import HALVES, heading
from shardscope_widgets.words import duration_text

_COLOURS = {"weak": "#2a86d1", "strong": "#c5372c"}
_WORDS = {"measured_s": "measured", "predicted_s": "formula", "simulated_s": "simulated"}


class ScalingLine(NamedTuple):
    """One line or one series of points: step times in seconds and efficiencies by number of workers."""

    kind: str
    source: str
    """``measured``, ``formula`` or ``simulated``."""
    workers: tuple[int, ...]
    seconds: tuple[float, ...]
    efficiency: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Upper ends of the prediction intervals of the step times (`low` has the lower), in seconds; empty if unknown."""


class ScalingInfo(NamedTuple):
    """All lines of a scaling study."""

    lines: tuple[ScalingLine, ...]
    num_kinds: int


def scaling_info(found: Scaling) -> ScalingInfo:
    """Return the data of the figure for a result of `shardscope.scaling` or `shardscope.extrapolate`."""
    kinds = tuple(dict.fromkeys(point.kind for point in found.points))
    lines = [
        _line(found, kind, time) for time in ("predicted_s", "simulated_s", "measured_s") for kind in kinds
    ]
    return ScalingInfo(tuple(line for line in lines if line.workers), len(kinds))


def _line(found: Scaling, kind: str, time: str) -> ScalingLine:
    rows = [
        (point, value)
        for point, value in zip(found.points, found.efficiencies(time), strict=True)
        if point.kind == kind and value is not None
    ]
    ends = [point.interval_s for point, _ in rows if point.interval_s is not None and time == "predicted_s"]
    has_ends = len(ends) == len(rows)
    return ScalingLine(
        kind, _WORDS[time], tuple(point.workers for point, _ in rows),
        tuple(getattr(point, time) for point, _ in rows), tuple(value for _, value in rows),
        tuple(low for low, _ in ends) if has_ends else (), tuple(high for _, high in ends) if has_ends else (),
    )  # fmt: skip


def scaling_text(info: ScalingInfo) -> str:
    """Return sentences with the efficiency at the largest number of workers."""
    said = [
        f"{line.kind.capitalize()} scaling, {line.source}: {line.efficiency[-1]:.1%} of the ideal on "
        f"{line.workers[-1]} workers, {duration_text(line.seconds[-1])} per step."
        for line in info.lines
        if line.source != "simulated" and len(line.workers) > 1
    ]
    return " ".join(said)


def scaling(found: Scaling) -> go.Figure:
    """Draw step time and efficiency by number of workers.

    Args:
        found: A result of `shardscope.scaling` or `shardscope.extrapolate`.
    """
    info = scaling_info(found)
    figure = go.Figure()
    for line in info.lines:
        if line.low:
            figure.add_trace(_band(line))
    for line in info.lines:
        figure.add_traces([_trace(info, line, "x"), _trace(info, line, "x2")])
    every = sorted({number for line in info.lines for number in line.workers}) or [1]
    text = [f"{number:,}" for number in every]
    x: dict[str, Any] = {"type": "log", "tickvals": every, "ticktext": text, "tickangle": 0}
    return theme.style(
        figure, height=340, head=80,
        annotations=[heading("Step time", HALVES[0][0]), heading("Efficiency", HALVES[1][0])],
        xaxis=theme.axis("workers", domain=HALVES[0], anchor="y", **x),
        xaxis2=theme.axis("workers", domain=HALVES[1], anchor="y2", **x),
        yaxis=theme.axis("seconds", rangemode="tozero", anchor="x"),
        yaxis2=theme.axis("of the ideal", tickformat=".0%", range=[0, 1.06], anchor="x2"),
        shapes=[theme.rule(theme.GREY, y=1.0, axis="2", along="x2 domain", width=1.0, dash="dot")],
    )  # fmt: skip


def _trace(info: ScalingInfo, line: ScalingLine, axis: str) -> go.Scatter:
    colour, is_left = _COLOURS[line.kind], axis == "x"
    name = line.source if info.num_kinds == 1 else f"{line.kind}, {line.source}"
    dash = {"formula": "solid", "simulated": "dot"}.get(line.source)
    values = line.seconds if is_left else line.efficiency
    look: dict[str, Any] = {"mode": "lines", "line": {"color": colour, "width": 2, "dash": dash}}
    if dash is None:
        symbol = "circle" if line.kind == "weak" else "square"
        look = {
            "mode": "markers",
            "marker": {"size": 9, "color": colour, "symbol": symbol},
            "cliponaxis": False,
        }
    hover = (
        f"<b>{name}</b>, %{{x}} workers<br>%{{customdata[0]}} per step, %{{customdata[1]:.1%}} of the ideal"
    )
    return go.Scatter(
        x=line.workers, y=values, xaxis=axis, yaxis=axis.replace("x", "y"), name=name, legendgroup=name,
        showlegend=is_left, hovertemplate=f"{hover}<extra></extra>",
        customdata=[[duration_text(s), e] for s, e in zip(line.seconds, line.efficiency, strict=True)], **look,
    )  # fmt: skip


def _band(line: ScalingLine) -> go.Scatter:
    """Return the prediction interval of the step times as a band."""
    return go.Scatter(
        x=[*line.workers, *line.workers[::-1]], y=[*line.high, *line.low[::-1]], mode="lines", fill="toself",
        line={"width": 0, "color": _COLOURS[line.kind]}, opacity=0.25, showlegend=False, hoverinfo="skip",
    )  # fmt: skip
