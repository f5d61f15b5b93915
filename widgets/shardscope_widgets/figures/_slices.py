"""Slice plot of a study: one small plot per setting, with the objective of each complete trial against its value."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.spec.space import Between, Choices, PowersOfTwo, Space, Value
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._front import CHOSEN, LINE, is_wide, log_ticks
from shardscope_widgets.figures._trials import TrialInfo, title_of, value_text
from shardscope_widgets.words import plural

Spec = dict[str, Any]
ACROSS = 3
_ROW = 190
_GAP = 62


class Slice(NamedTuple):
    """The plot of one setting."""

    name: str
    kind: str
    """Type of the x-axis: ``log``, ``linear`` or ``category``."""
    values: tuple[Value, ...]
    """Values on a categorical axis, in order; empty for other kinds of axis."""
    points: tuple[tuple[Value, float, int, bool], ...]
    """(value, objective, trial number, whether the trial is on the Pareto front) for each trial."""


class SlicesInfo(NamedTuple):
    """Plots of all settings that were sampled by at least one complete trial."""

    objective: str
    slices: tuple[Slice, ...]
    chosen: int | None


def slices_info(
    trials: Sequence[TrialInfo], space: Space, *, objective: str, chosen: int | None = None
) -> SlicesInfo:
    """Collect, for each setting, the complete trials that sampled it."""
    done = [trial for trial in trials if trial.state == "complete" and objective in trial.values]
    slices = []
    for name, parameter in space.parameters.items():
        points = tuple(
            (dict(trial.params)[name], trial.values[objective], trial.number, trial.is_front)
            for trial in done
            if name in dict(trial.params)
        )
        if points:
            kind, values = _kind(parameter)
            slices.append(Slice(name, kind, values, points))
    return SlicesInfo(objective, tuple(slices), chosen)


def _kind(parameter: Choices | Between | PowersOfTwo) -> tuple[str, tuple[Value, ...]]:
    if isinstance(parameter, Choices):
        return "category", parameter.values
    if isinstance(parameter, PowersOfTwo):
        low, high = parameter.exponents
        return "category", tuple(2**exponent for exponent in range(low, high + 1))
    return ("log" if parameter.log else "linear"), ()


def slices_text(info: SlicesInfo) -> str:
    """Return a sentence on what the plots show."""
    if not info.slices:
        return "A slice appears with the first complete trial."
    return f"{plural(len(info.slices), 'setting')}, {title_of(info.objective)} on the y-axis; green: Pareto front."


def slices_spec(info: SlicesInfo) -> Spec:
    """Return the plots as Plotly JSON, `ACROSS` per row."""
    rows = max(1, ceil(len(info.slices) / ACROSS))
    height = rows * _ROW + 30
    layout = theme.look(height=height, margin={"l": 8, "r": 12, "t": 12, "b": 8}, showlegend=False)
    data: list[Spec] = []
    up = _up([y for one in info.slices for _, y, *_ in one.points], info.objective)
    for place, one in enumerate(info.slices):
        tail = "" if place == 0 else str(place + 1)
        row, column = divmod(place, ACROSS)
        width, tall = 1 / ACROSS, 1 / rows
        top = 1 - row * tall
        layout[f"xaxis{tail}"] = theme.axis(one.name, anchor=f"y{tail}", **_scale(one)) | {
            "domain": [column * width + (0.045 if column else 0.0), (column + 1) * width - 0.012],
        }  # fmt: skip
        layout[f"yaxis{tail}"] = theme.axis(
            "" if column else title_of(info.objective),
            anchor=f"x{tail}",
            **(up | ({"matches": "y"} if place else {})),
        ) | {
            "domain": [top - tall + _GAP / height, top],
            "automargin": column == 0,
        }
        data.append(_points(one, tail, info.chosen))
    return {"data": data, "layout": layout}


def _up(values: Sequence[float], objective: str) -> Spec:
    """Return settings of the y-axis that all plots share, so that heights can be compared."""
    if is_wide(values):
        return {"type": "log", **log_ticks(min(values), max(values), objective)}
    return {"nticks": 5}


def _scale(one: Slice) -> Spec:
    if one.kind == "category":
        names = [value_text(value) for value in one.values]
        return {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": names,
            "range": [-0.6, len(names) - 0.4],
        }
    values = [float(str(value)) for value, *_ in one.points]
    if one.kind == "log":
        return {"type": "log", **log_ticks(min(values), max(values))}
    return {"type": "linear", "nticks": 5}


def _points(one: Slice, tail: str, chosen: int | None) -> Spec:
    return {
        "type": "scatter", "mode": "markers", "xaxis": f"x{tail}", "yaxis": f"y{tail}", "name": one.name,
        "x": [value_text(x) if one.kind == "category" else x for x, *_ in one.points],
        "y": [y for _, y, *_ in one.points],
        "customdata": [number for *_, number, _ in one.points],
        "hovertemplate": "trial %{customdata}: %{x}, %{y:.4g}<extra></extra>",
        "marker": {
            "line": {"width": 0},
            "size": [11 if number == chosen else 7 for *_, number, _ in one.points],
            "color": [CHOSEN if number == chosen else LINE if front else "#7f8ecb" for *_, number, front in one.points],
            "opacity": [1.0 if front or number == chosen else 0.6 for *_, number, front in one.points],
        },
    }  # fmt: skip


def slices(trials: Sequence[TrialInfo], space: Space, *, objective: str = "loss") -> go.Figure:
    """Draw the objective of the complete trials against each setting."""
    return go.Figure(slices_spec(slices_info(trials, space, objective=objective)))
