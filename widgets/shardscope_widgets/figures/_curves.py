"""Curves over steps, one per run: loss, throughput, bytes sent."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.measure.compare_runs.view import DIVERGED
from shardscope.runlog.figures import loss_text
from shardscope.spec.units import plural
from shardscope_widgets.figures import theme
from shardscope_widgets.figures.theme import RunStyle, method_look
from shardscope_widgets.trace import Trace, named_apart

MOST_POINTS = 600
"""Maximum number of points per curve; for longer runs, only every second, third, ... step is drawn."""
FEW_POINTS = 8
"""Number of steps below which each step has a marker."""
_MOST_RESIZES = 12
"""Maximum number of marks at changes of the number of ranks over all runs; the newest changes are marked."""
SMOOTHING = 10
"""Default span of the exponential average, in steps."""


class LossView(NamedTuple):
    """How the loss is drawn: the span of the exponential average in steps (0 for none), and whether the axis is
    logarithmic.
    """

    smoothing: int = SMOOTHING
    is_log: bool = False


PLAIN = LossView()


class Curve(NamedTuple):
    """One run's value at each step; `smooth` is the moving average, drawn as a bold line.

    `diverged_at` is the step at which the loss diverged; None if it did not. `resizes` are the steps at which the
    number of ranks changed, with the new number.
    """

    label: str
    look: RunStyle
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    smooth: tuple[float | None, ...]
    diverged_at: int | None = None
    resizes: tuple[tuple[int, int], ...] = ()


class RunCurvesInfo(NamedTuple):
    """Data of a plot of curves: the name of the quantity, its unit, one curve per run, and how they are smoothed."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    view: LossView = PLAIN


def moving_average(values: Iterable[float], *, span: float, every: int = 1) -> array[float]:
    """Return the exponential moving average of `values` over the steps before and after each step.

    The weight of a step falls by the same factor with each step of distance in either direction, so that the average
    runs through the values of a falling loss, and not above them as an average over earlier steps would; at the newest
    step there are only earlier ones. Non-finite values are skipped and yield NaN.

    Args:
        values: The values to smooth.
        span: Number of steps n of the average; each direction has the weights of an average over n / 2 steps, whose
            newest value has the weight 2 / (n / 2 + 1). At least 2.
        every: Only every `every`-th average is returned.
    """
    keep, row = 1 - 2 / (span / 2 + 1), array("d", values)
    totals, weights = array("d"), array("d")
    total = weight = 0.0
    for value in row:
        is_finite = math.isfinite(value)
        total, weight = keep * total + (value if is_finite else 0.0), keep * weight + is_finite
        totals.append(total)
        weights.append(weight)
    smooth = array("d", [math.nan]) * len(range(0, len(row), every))
    total = weight = 0.0  # of the later steps
    for place in reversed(range(len(row))):
        is_finite = math.isfinite(row[place])
        if is_finite and place % every == 0:
            smooth[place // every] = (totals[place] + total) / (weights[place] + weight)
        total, weight = keep * (total + (row[place] if is_finite else 0.0)), keep * (weight + is_finite)
    return smooth


def _curves(traces: Sequence[Trace], field: str, smoothing: int) -> tuple[Curve, ...]:
    looks = theme.run_looks(traces)
    return tuple(
        _curve(trace, look, field, smoothing) for trace, look in zip(named_apart(traces), looks, strict=True)
    )


def _curve(trace: Trace, look: RunStyle, field: str, smoothing: int) -> Curve:
    """Return the points to draw.

    The values are arrays, which are copied at each redraw, because lists would take 32 bytes per step.
    """
    every = max(1, math.ceil(len(trace.steps) / MOST_POINTS))
    values, steps = trace.steps.column(field, every), trace.steps.column("number", every)
    smooth = (
        moving_average(trace.steps.column(field), span=smoothing, every=every) if smoothing > 1 else values
    )
    diverged = trace.divergence if field == "loss" else None
    return Curve(
        trace.label, look, tuple(steps), finite_or_none(values), finite_or_none(smooth), diverged and diverged.step,
        tuple((each.step, each.after) for each in trace.resizes),
    )  # fmt: skip


def finite_or_none(values: Iterable[float]) -> tuple[float | None, ...]:
    """Return the values, with None in place of non-finite values."""
    return tuple(value if math.isfinite(value) else None for value in values)


def loss_info(traces: Sequence[Trace], view: LossView = PLAIN) -> RunCurvesInfo:
    """Return curves of the training loss: the mean over ranks of each rank's mean over its samples."""
    return RunCurvesInfo("Loss", "", _curves(traces, "loss", view.smoothing), view)


def throughput_info(traces: Sequence[Trace]) -> RunCurvesInfo:
    """Return curves of tokens per second if every run counts tokens, otherwise samples per second, over all ranks."""
    begun = [trace for trace in traces if trace.steps]
    tokens = begun and all(trace.measures_tokens for trace in begun)
    field, unit = ("tokens_per_s", "tokens/s") if tokens else ("samples_per_s", "samples/s")
    return RunCurvesInfo("Throughput", unit, _curves(traces, field, SMOOTHING))


def traffic_info(traces: Sequence[Trace]) -> RunCurvesInfo:
    """Return curves of the bytes sent in each step, summed over ranks."""
    return RunCurvesInfo("Sent per step", "B", _curves(traces, "sent_bytes", 0), LossView(0))


def smoothing_text(span: int) -> str:
    """Return a text on how the bold lines are smoothed; empty if they are not smoothed."""
    return f"bold: exponential average over {span} steps" if span > 1 else ""


def loss_range(info: RunCurvesInfo) -> tuple[float, float] | None:
    """Return the range of the loss axis that shows the runs that did not diverge; None to show all runs.

    A logarithmic axis shows all runs, as does a linear axis if none or all of them diverged.
    """
    kept = [curve for curve in info.curves if curve.diverged_at is None]
    values = [value for curve in kept for value in curve.values if value is not None]
    if info.view.is_log or len(kept) == len(info.curves) or not values:
        return None
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def loss_axis(info: RunCurvesInfo) -> dict[str, Any]:
    """Return the settings of the loss axis that depend on the data: linear or logarithmic, and its range."""
    span = loss_range(info)
    kind = "log" if info.view.is_log else "linear"
    kept: dict[str, Any] = {"autorange": True} if span is None else {"autorange": False, "range": list(span)}
    return {"type": kind, "uirevision": f"{kind} {span is None}", **kept}


def divergence_notes(info: RunCurvesInfo) -> list[dict[str, Any]]:
    """Return a mark for each run that left the range of the loss axis, with its name and its highest loss."""
    if loss_range(info) is None:
        return []
    gone = [curve for curve in info.curves if curve.diverged_at is not None]
    return [
        theme.note(f"{DIVERGED} {curve.label}: off the scale, up to {loss_text(_highest(curve))}", x=1, y=1)
        | {"xref": "x domain", "yref": "y domain", "xanchor": "right", "yanchor": "top"}
        | {"yshift": -2 - 15 * place, "font": {"size": 11.5, "color": theme.GREY}}
        for place, curve in enumerate(gone)
    ]


def _highest(curve: Curve) -> float:
    return max((value for value in curve.values if value is not None), default=math.nan)


def curve_lines(curve: Curve, unit: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trace properties of a curve's two lines: faint for raw values, bold for smoothed values."""
    look, is_smooth = curve.look, curve.smooth != curve.values
    mark = f" {DIVERGED} diverged" if curve.diverged_at is not None else ""
    average = "<br>average %{y:.4s}" if is_smooth else ""
    raw = {
        "x": curve.steps,
        "y": curve.values,
        "name": curve.label,
        "mode": "lines",
        "opacity": 0.28 if is_smooth else 0,
        "line": {"color": look.colour, "width": 1},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": curve.label,
    }
    bold = raw | {
        "y": curve.smooth,
        "customdata": curve.values,
        "mode": "lines+markers" if len(curve.steps) < FEW_POINTS else "lines",
        "opacity": 1,
        "line": {"color": look.colour, "width": 2.2, "dash": look.dash},
        "zorder": 1 + look.zorder,
        "marker": {"color": look.colour, "size": 5},
        "hoverinfo": "all",
        "hovertemplate": f"%{{fullData.name}}{mark}<br>step %{{x}}: %{{customdata:.4s}} {unit}{average}<extra></extra>",
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
    """Draw two lines per run: a faint line for the values, a bold line for their moving average."""
    figure = go.Figure()
    for curve in info.curves:
        for line in curve_lines(curve, info.unit):
            figure.add_trace(go.Scatter(line))
    title = f"{info.title}, {info.unit}" if info.unit not in {"", "B"} else info.title
    axis = value_axis(info.unit) | {"title": {"text": title}}
    if not info.unit:
        axis |= loss_axis(info)
    note = smoothing_text(info.view.smoothing)
    figure.update_layout(
        xaxis=theme.axis(f"step ({note})" if note else "step"),
        yaxis=axis,
        annotations=divergence_notes(info) + resize_notes(info),
    )
    return theme.style(figure, height=height)


def loss(
    traces: Sequence[Trace],
    *,
    smoothing: int = SMOOTHING,
    is_log: bool = False,
    by_method: bool = False,
) -> go.Figure:
    """Draw the loss curves of several runs in one plot.

    The axis has the range of the runs that did not diverge; a mark shows the highest loss of each run that did.

    Args:
        traces: The runs.
        smoothing: Span of the exponential average in steps; 0 draws the values alone.
        is_log: Whether the loss axis is logarithmic.
        by_method: Whether a run has the colour of its compression method, as in the figure `compression`.
    """
    info = loss_info(traces, LossView(smoothing, is_log))
    if by_method:
        looks = [RunStyle(*method_look(trace.method)[:2]) for trace in traces]
        curves = (curve._replace(look=look) for curve, look in zip(info.curves, looks, strict=True))
        info = info._replace(curves=tuple(curves))
    return draw(info)


def throughput(traces: Sequence[Trace]) -> go.Figure:
    """Draw the throughput of several runs over their steps."""
    return draw(throughput_info(traces))


def traffic(traces: Sequence[Trace]) -> go.Figure:
    """Draw the bytes that several runs sent in each step."""
    return draw(traffic_info(traces))


def resize_notes(info: RunCurvesInfo, *, x: str = "x", y: str = "y") -> list[dict[str, Any]]:
    """Return a mark at the step axis for each change of the number of ranks, with the new number.

    Args:
        info: The curves.
        x: Plotly reference of the step axis.
        y: Plotly reference of the value axis.
    """
    changes = [(step, curve, ranks) for curve in info.curves for step, ranks in curve.resizes]
    return [
        {
            "text": plural(ranks, "rank") if len(info.curves) == 1 else f"{curve.label}: {plural(ranks, 'rank')}",
            "x": step, "xref": x, "y": 0, "yref": f"{y} domain", "ax": 0, "ay": -16, "showarrow": True, "arrowhead": 0,
            "arrowwidth": 1, "arrowcolor": curve.look.colour, "font": {"size": 11, "color": theme.GREY},
        }
        for step, curve, ranks in sorted(changes, key=lambda change: change[0])[-_MOST_RESIZES:]
    ]  # fmt: skip
