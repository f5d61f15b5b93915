"""Curves over steps, one per run: loss, throughput, bytes sent."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.trace import Trace

MOST_POINTS = 600
"""Maximum number of points per curve; for longer runs, only every second, third, ... step is drawn."""
FEWEST_TO_SMOOTH = 8


class Curve(NamedTuple):
    """One run's value at each step; `smooth` is the moving average, drawn as a bold line."""

    label: str
    strategy: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    smooth: tuple[float | None, ...]


class RunCurvesInfo(NamedTuple):
    """Data of a plot of curves: the name of the quantity, its unit and one curve per run."""

    title: str
    unit: str
    curves: tuple[Curve, ...]


def moving_average(values: Iterable[float], *, count: int, every: int = 1) -> array[float]:
    """Return the exponential moving average of `values`, corrected for start-up bias.

    The span grows with `count` from 3 to 50 steps. Non-finite values are skipped and yield NaN.

    Args:
        values: The values to smooth.
        count: Number of values.
        every: Only every `every`-th average is returned.
    """
    span = min(50.0, max(3.0, count / 15))
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    smooth = array("d")
    for place, value in enumerate(values):
        is_finite = math.isfinite(value)
        if is_finite:
            total, weight = keep * total + value, keep * weight + 1
        if place % every == 0:
            smooth.append(total / weight if is_finite else math.nan)
    return smooth


def _curve(trace: Trace, field: str) -> Curve:
    """Return the points to draw.

    Each redraw copies the steps into arrays, because lists would take 32 bytes per step in a long run.
    """
    count = len(trace.steps)
    every = max(1, math.ceil(count / MOST_POINTS))
    values, steps = trace.steps.column(field, every), trace.steps.column("number", every)
    smooth = (
        moving_average(trace.steps.column(field), count=count, every=every)
        if count >= FEWEST_TO_SMOOTH
        else values
    )
    return Curve(trace.label, trace.strategy, tuple(steps), finite_or_none(values), finite_or_none(smooth))


def finite_or_none(values: Iterable[float]) -> tuple[float | None, ...]:
    """Return the values, with None in place of non-finite ones."""
    return tuple(value if math.isfinite(value) else None for value in values)


def loss_info(traces: Sequence[Trace]) -> RunCurvesInfo:
    """Return curves of the training loss: the mean over ranks of each rank's mean over its samples."""
    return RunCurvesInfo("Loss", "", tuple(_curve(trace, "loss") for trace in traces))


def throughput_info(traces: Sequence[Trace]) -> RunCurvesInfo:
    """Return curves of tokens per second if every run counts tokens, otherwise samples per second, over all ranks."""
    begun = [trace for trace in traces if trace.steps]
    if begun and all(trace.measures_tokens for trace in begun):
        return RunCurvesInfo("Throughput", "tokens/s", tuple(_curve(t, "tokens_per_s") for t in traces))
    return RunCurvesInfo("Throughput", "samples/s", tuple(_curve(t, "samples_per_s") for t in traces))


def traffic_info(traces: Sequence[Trace]) -> RunCurvesInfo:
    """Return curves of the bytes sent in each step, summed over ranks."""
    curves = tuple(_curve(trace, "sent_bytes") for trace in traces)
    return RunCurvesInfo("Sent per step", "B", tuple(curve._replace(smooth=curve.values) for curve in curves))


def curve_lines(curve: Curve, look: RunStyle, unit: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trace properties of a curve's two lines: faint for raw values, bold for smoothed ones."""
    raw = {
        "x": curve.steps,
        "y": curve.values,
        "name": curve.label,
        "mode": "lines",
        "opacity": 0.28,
        "line": {"color": look.colour, "width": 1},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": curve.label,
    }
    bold = raw | {
        "y": curve.smooth,
        "mode": "lines+markers" if len(curve.steps) < FEWEST_TO_SMOOTH else "lines",
        "opacity": 1,
        "line": {"color": look.colour, "width": 2.2, "dash": look.dash},
        "zorder": 1 + look.zorder,
        "marker": {"color": look.colour, "size": 5},
        "hoverinfo": "all",
        "hovertemplate": f"%{{fullData.name}}<br>step %{{x}}: %{{y:.4s}} {unit}<extra></extra>",
        "showlegend": True,
    }
    return raw, bold


def value_axis(unit: str) -> dict[str, Any]:
    """Return settings of the value axis for a unit; tick labels look like ``12k`` for rates and ``3.2MB`` for bytes."""
    if unit == "B":
        return theme.axis(tickformat="~s", ticksuffix="B", rangemode="tozero", nticks=5)
    if unit:
        return theme.axis(tickformat="~s", rangemode="tozero", nticks=5)
    return theme.axis(nticks=5)


def draw(info: RunCurvesInfo, *, height: int = 320) -> go.Figure:
    """Draw the figure for `info`."""
    figure = go.Figure()
    looks = theme.run_looks([curve.strategy for curve in info.curves])
    for curve, look in zip(info.curves, looks, strict=True):
        for line in curve_lines(curve, look, info.unit):
            figure.add_trace(go.Scatter(line))
    title = f"{info.title}, {info.unit}" if info.unit not in {"", "B"} else info.title
    figure.update_layout(xaxis=theme.axis("step"), yaxis=value_axis(info.unit) | {"title": {"text": title}})
    return theme.style(figure, height=height)


def loss(traces: Sequence[Trace]) -> go.Figure:
    """Draw the loss curves of several runs in one plot."""
    return draw(loss_info(traces))


def throughput(traces: Sequence[Trace]) -> go.Figure:
    """Draw the throughput of several runs over their steps."""
    return draw(throughput_info(traces))


def traffic(traces: Sequence[Trace]) -> go.Figure:
    """Draw the bytes that several runs sent in each step."""
    return draw(traffic_info(traces))
