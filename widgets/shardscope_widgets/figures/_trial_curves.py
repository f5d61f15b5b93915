"""Learning curves of the trials of a study: validation loss or error against the fraction of training completed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures._front import CHOSEN, LINE, PRUNED, RUNNING, is_wide, log_ticks
from shardscope_widgets.figures._trials import TrialInfo, objective_text, quality_curve, title_of
from shardscope_widgets.words import plural

Spec = dict[str, Any]
KINDS = {
    "dominated": {"color": "rgba(127,132,141,0.6)", "width": 1},
    "pruned": {"color": PRUNED, "width": 1.2, "dash": "dot"},
    "on the front": {"color": LINE, "width": 1.8},
    "running": {"color": RUNNING, "width": 2.2},
    "chosen": {"color": CHOSEN, "width": 2.4},
}
"""Line styles by kind of trial, in drawing order: later kinds lie on top."""


class TrialCurve(NamedTuple):
    """One trial's curve as (fraction of training completed, quality) points."""

    number: int
    kind: str
    points: tuple[tuple[float, float], ...]


class TrialCurvesInfo(NamedTuple):
    """Curves of the trials, and the quality that they show: ``loss`` or ``error``."""

    quality: str
    curves: tuple[TrialCurve, ...]


def trial_curves_info(
    trials: Sequence[TrialInfo], *, quality: str = "loss", chosen: int | None = None
) -> TrialCurvesInfo:
    """Return the curves of all trials that were evaluated at least once."""
    curves = (
        TrialCurve(trial.number, _kind(trial, chosen), tuple(quality_curve(trial, quality)))
        for trial in trials
    )
    return TrialCurvesInfo(quality, tuple(curve for curve in curves if curve.points))


def _kind(trial: TrialInfo, chosen: int | None) -> str:
    if trial.number == chosen:
        return "chosen"
    if trial.state in {"running", "pruned"}:
        return trial.state
    return "on the front" if trial.is_front else "dominated"


def trial_curves_text(info: TrialCurvesInfo) -> str:
    """Return a sentence that names the trial whose curve ends lowest."""
    ends = [(curve.points[-1][1], curve.number) for curve in info.curves if curve.points[-1][0] >= 1]
    if not ends:
        return "A trial's curve appears after its first evaluation."
    value, number = min(ends)
    return f"{plural(len(info.curves), 'curve')}; trial {number} ends lowest, at {objective_text(info.quality, value)}."


def trial_curves_spec(info: TrialCurvesInfo) -> Spec:
    """Return the plot as Plotly JSON, with one trace per kind of trial, which stays fast for hundreds of trials."""
    traces = [_trace(kind, [curve for curve in info.curves if curve.kind == kind]) for kind in KINDS]
    layout = _layout()
    ends = [point[1] for curve in info.curves for point in curve.points]
    axis = layout["yaxis"] | {"title": layout["yaxis"]["title"] | {"text": title_of(info.quality)}}
    axis |= (
        {"type": "log", **log_ticks(min(ends), max(ends), info.quality)}
        if is_wide(ends)
        else {"type": "linear", "tickmode": "auto"}
    )
    data = [trace for trace in traces if trace["x"]]
    empty = {} if data else theme.empty("A curve appears after<br>a trial's first evaluation.")
    return {"data": data, "layout": layout | {"yaxis": axis} | empty}


def trial_curves(trials: Sequence[TrialInfo], *, quality: str = "loss") -> go.Figure:
    """Draw the learning curves of trials."""
    return go.Figure(trial_curves_spec(trial_curves_info(trials, quality=quality)))


@cache
def _layout() -> Spec:
    look = theme.look(height=380, margin={"l": 8, "r": 12, "t": 34, "b": 8})
    legend = theme.LEGEND_ABOVE | {"font": {"size": 11.5}, "itemclick": False}
    return look | {
        "legend": legend,
        "xaxis": theme.axis("fraction of training", tickformat=".0%", range=[0, 1.03]),
        "yaxis": theme.axis(),
    }


def _trace(kind: str, curves: Sequence[TrialCurve]) -> Spec:
    few = kind in {"running", "chosen"}
    return {
        "type": "scatter", "mode": "lines+markers" if few else "lines", "name": kind, "line": KINDS[kind],
        "marker": {"size": 5}, "connectgaps": False,
        "x": [value for curve in curves for value in (*(x for x, _ in curve.points), None)],
        "y": [value for curve in curves for value in (*(y for _, y in curve.points), None)],
        "customdata": [curve.number for curve in curves for _ in range(len(curve.points) + 1)],
        "hovertemplate": "trial %{customdata}: %{y:.4g} at %{x:.0%}<extra></extra>",
    }  # fmt: skip
