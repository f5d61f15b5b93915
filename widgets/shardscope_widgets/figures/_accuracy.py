"""Accuracy of predictions: the ratio of predicted to measured step time of each run, in order of launch."""

from __future__ import annotations

from math import log10
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.calibration.calibration import Interval
from shardscope.measure.accuracy import Accuracy, PredictedRun
from shardscope.spec import registry
from shardscope.spec.look import YOUR_OWN
from shardscope.spec.strategy import Strategy
from shardscope_widgets.figures import theme
from shardscope_widgets.words import duration_text

_TICKS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_LEAST_SPAN = 1.6


class AccuracyPoint(NamedTuple):
    """Prediction and measurement of one run."""

    number: int
    """Position of the run in the order of launches, from 1."""
    name: str
    strategy: str
    predicted_s: float
    measured_s: float
    load: float
    """Load average of the machine at the launch."""
    interval: Interval
    """The prediction interval of the step time, in seconds; has length 0 if unknown."""

    def over_measured(self, seconds: float) -> float:
        """Return a predicted time divided by the measured time."""
        return seconds / self.measured_s


class AccuracyInfo(NamedTuple):
    """All points, and the description of each set of constants with the number of the first run that used it."""

    points: tuple[AccuracyPoint, ...]
    constants: tuple[tuple[int, str], ...]


def accuracy_info(found: Accuracy) -> AccuracyInfo:
    """Return the data of the figure for a result of `shardscope.accuracy`."""
    points, constants, before = [], [], ""
    for number, run in enumerate(found.runs, start=1):
        points.append(_point(number, run))
        if run.predicted.constants != before:
            before = run.predicted.constants
            constants.append((number, before))
    return AccuracyInfo(tuple(points), tuple(constants))


def _point(number: int, run: PredictedRun) -> AccuracyPoint:
    seconds, strategy = run.predicted.step_time_s, str(run.settings.get("strategy"))
    interval = run.predicted.interval or Interval(seconds, seconds)
    return AccuracyPoint(number, run.name, strategy, seconds, run.measured_s, run.predicted.load, interval)


def draw_accuracy(info: AccuracyInfo) -> go.Figure:
    """Draw one marker per run, with its prediction interval, on a logarithmic axis around 1."""
    figure = go.Figure()
    for strategy in dict.fromkeys(point.strategy for point in info.points):
        figure.add_trace(_trace(strategy, [point for point in info.points if point.strategy == strategy]))
    ratios = [point.over_measured(point.predicted_s) for point in info.points]
    span = max([_LEAST_SPAN, *(1.15 * max(ratio, 1 / ratio) for ratio in ratios)])
    ticks = [tick for tick in _TICKS if 1 / span <= tick <= span]
    starts = [theme.rule(theme.GREY, x=number - 0.5, width=1.0, dash="dot") for number, _ in info.constants]
    notes = [
        theme.note(text, x=number - 0.5, y=1.0)
        | {"xref": "x", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        for number, text in info.constants
    ]
    return theme.style(
        figure, height=340, head=90,
        annotations=notes, shapes=[theme.rule(theme.GREY, y=1.0, width=1.5), *starts],
        xaxis=theme.axis("runs, in order of launch", range=[0.4, len(info.points) + 0.6], tickformat="d"),
        yaxis=theme.axis(
            "predicted / measured step time", type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks],
            range=[-log10(span), log10(span)],
        ),
    )  # fmt: skip


def _trace(strategy: str, points: list[AccuracyPoint]) -> go.Scatter:
    method = registry.find(Strategy, strategy)
    look = YOUR_OWN if method is None else method.look
    lows, ratios, highs = zip(
        *(
            [
                point.over_measured(seconds)
                for seconds in (point.interval.low, point.predicted_s, point.interval.high)
            ]
            for point in points
        ),
        strict=True,
    )
    return go.Scatter(
        x=[point.number for point in points], y=ratios, mode="markers", name=strategy,
        marker={"size": 8, "color": look.colour, "symbol": look.symbol},
        error_y={
            "type": "data", "symmetric": False, "thickness": 1, "width": 0, "color": theme.tint(look.colour, 0.5),
            "array": [high - ratio for high, ratio in zip(highs, ratios, strict=True)],
            "arrayminus": [ratio - low for low, ratio in zip(lows, ratios, strict=True)],
        },
        customdata=[
            [point.name, duration_text(point.predicted_s), duration_text(point.measured_s), ratio - 1, point.load]
            for point, ratio in zip(points, ratios, strict=True)
        ],
        hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]} predicted, %{customdata[2]} measured "
        "(%{customdata[3]:+.0%}); load %{customdata[4]:.1f} at launch<extra></extra>",
    )  # fmt: skip


def accuracy(found: Accuracy) -> go.Figure:
    """Draw the ratio of predicted to measured step time of each run, in order of launch.

    Args:
        found: A result of `shardscope.accuracy`.
    """
    return draw_accuracy(accuracy_info(found))
