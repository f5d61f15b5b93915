"""The Pareto front of a study: quality against time or bytes, with the front as a line.

Complete trials are dots, coloured by a third objective; dominated trials are faint. Running trials are open diamonds,
with a dotted line down to an optimistic estimate of their final quality. Pruned trials are crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil, floor, log10
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.analytic import pareto
from shardscope.tuning.front import QUICKER_BY, note_of
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._trials import ORDER, TrialInfo, objective_text, title_of
from shardscope_widgets.words import listed, plural, safe

Spec = dict[str, Any]
SCALE = [[0, "#f2c14e"], [0.35, "#e58a3c"], [0.65, "#a34a86"], [1, "#5566cf"]]
"""Colour scale from low to high; its brightness decreases steadily."""
RUNNING, PRUNED, CHOSEN, LINE = "#2a86d1", "#8b8f99", "#c5372c", "#11997a"
WIDE = 6.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


class Dot(NamedTuple):
    """One trial as a point in the plot; `best` is an optimistic estimate of a running trial's final quality."""

    number: int
    x: float
    y: float
    colour: float | None
    is_front: bool
    is_pinned: bool
    text: str
    best: float | None = None
    is_by_noise: bool = False


class FrontInfo(NamedTuple):
    """Points and front of the plot; `x`, `y` and `colour` are names of objectives."""

    x: str
    y: str
    colour: str
    complete: tuple[Dot, ...]
    running: tuple[Dot, ...]
    pruned: tuple[Dot, ...]
    line: tuple[tuple[float, float], ...]
    chosen: int | None
    link: str
    missing: int
    """Number of complete trials that lack a value on at least one axis."""


def front_info(
    trials: Sequence[TrialInfo],
    *,
    x: str = "seconds",
    y: str = "loss",
    colour: str = "bytes",
    chosen: int | None = None,
    link: str = "",
) -> FrontInfo:
    """Return the points of a plot of two objectives, coloured by a third; trials that lack `x` or `y` are left out.

    Args:
        trials: The trials; `is_front` refers to all objectives of the study.
        x: Objective on the x-axis. With ``trial``, trials are placed in the order in which they started, and the line
            shows the best value so far.
        y: Objective on the y-axis.
        colour: Objective shown as colour; empty for none.
        chosen: Number of the chosen trial.
        link: Name of the network link for which the times were predicted; empty for measured times.
    """
    placed = [trial for trial in trials if (x == ORDER or x in trial.values) and y in trial.values]
    dots = {
        state: tuple(_dot(trial, x, y, colour) for trial in placed if trial.state == state)
        for state in ("complete", "running", "pruned")
    }
    missing = sum(trial.state == "complete" for trial in trials) - len(dots["complete"])
    return FrontInfo(
        x, y, colour, dots["complete"], dots["running"], dots["pruned"],
        _line_of(dots["complete"], x), chosen, link, missing,
    )  # fmt: skip


def _dot(trial: TrialInfo, x: str, y: str, colour: str) -> Dot:
    parts = [f"{title_of(name)} {objective_text(name, value)}" for name, value in trial.values.items()]
    lines = [
        f"<b>trial {trial.number}</b>, {trial.state}{' and pinned' * trial.is_pinned}",
        *map(safe, parts),
    ]
    lines += [f"{safe(name)}: {safe(value)}" for name, value in trial.params]
    if trial.state == "running":
        lines.append(f"step {trial.done} of {trial.steps}")
    if trial.reason:
        lines.append(safe(trial.reason))
    if trial.is_by_noise:
        lines.append(f"better than the front only in time, by less than {QUICKER_BY:.0%}")
    best = trial.best if y in {"loss", "error"} else None
    across = float(trial.number) if x == ORDER else trial.values[x]
    return Dot(
        trial.number, across, trial.values[y], trial.values.get(colour) if colour else None, trial.is_front,
        trial.is_pinned, "<br>".join(lines), best, trial.is_by_noise,
    )  # fmt: skip


def _line_of(complete: Sequence[Dot], x: str) -> tuple[tuple[float, float], ...]:
    """Return the Pareto front in these two objectives; if x is the order of trials, the best value so far instead."""
    steps = staircase([(dot.x, dot.y) for dot in complete if not dot.is_by_noise or x == ORDER])
    last = max((dot.x for dot in complete), default=0.0)
    return (*steps, (last, steps[-1][1])) if x == ORDER and steps and steps[-1][0] < last else steps


def staircase(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the Pareto-optimal points (lower x and lower y are better), from left to right."""
    return tuple(sorted(points[at] for at in pareto.front(points, in_turn=True)))


def front_text(info: FrontInfo) -> str:
    """Return sentences on the ends of the front (or the best trial so far) and on the other trials."""
    if not info.complete:
        return "No trial is complete yet." + _others(info)
    at = {(dot.x, dot.y): dot for dot in info.complete}
    steps = [at[place] for place in info.line if place in at]
    if info.x == ORDER:
        best = steps[-1]
        return (
            f"Best of {plural(len(info.complete), 'complete trial')}: trial {best.number} with "
            f"{objective_text(info.y, best.y)} ({title_of(info.y)}). The line shows the best value so far."
            + _others(info)
        )
    ends = [
        f"trial {dot.number} with {objective_text(info.y, dot.y)} ({title_of(info.y)}) at "
        f"{objective_text(info.x, dot.x)}"
        for dot in dict.fromkeys((steps[0], steps[-1]))
    ]
    whole = plural(len(info.complete), "complete trial")
    line = f"best of {whole}" if len(ends) == 1 else f"the line joins {len(steps)} of {whole}; its ends"
    told = f"On {info.link}, {line}" if info.link else f"{line[0].upper()}{line[1:]}"
    front = sum(dot.is_front for dot in info.complete)
    return (
        f"{told}: {listed(ends)}. Ringed in green: the {front} on the Pareto front of all objectives."
        + _noise_text(info)
        + _others(info)
    )


def _noise_text(info: FrontInfo) -> str:
    note = note_of(tuple(dot.number for dot in info.complete if dot.is_by_noise))
    return "" if note is None else f" {note}"


def _others(info: FrontInfo) -> str:
    more = [plural(len(info.running), "running trial")] if info.running else []
    more += [f"{len(info.pruned)} pruned"] if info.pruned else []
    return f" Also {listed(more)}." if more else ""


def front_spec(info: FrontInfo) -> Spec:
    """Return the figure as Plotly JSON."""
    columns = _columns(info)
    layout = _layout()
    axes = {
        name: layout[name] | _axis(title, *values)
        for name, title, values in zip(("xaxis", "yaxis"), (info.x, info.y), columns, strict=True)
    }
    if info.link and info.x == "seconds":
        axes["xaxis"] |= {"title": axes["xaxis"]["title"] | {"text": f"seconds of training on {info.link}"}}
    marks = [_line(info), _complete(info, is_front=False), *_hopes(info), _pruned(info), _running(info)]
    marks += [_complete(info, is_front=True), *_rings(info)]
    data = [mark for mark in marks if mark["x"]]
    return {
        "data": data,
        "layout": layout | axes | ({} if data else theme.empty("Trials appear here as they run.")),
    }


def front(
    trials: Sequence[TrialInfo], *, x: str = "seconds", y: str = "loss", colour: str = "bytes"
) -> go.Figure:
    """Draw trials by two objectives, coloured by a third, with their Pareto front."""
    return go.Figure(front_spec(front_info(trials, x=x, y=y, colour=colour)))


@cache
def _layout() -> Spec:
    look = theme.look(height=380, margin={"l": 8, "r": 8, "t": 34, "b": 8})
    legend = theme.LEGEND_ABOVE | {"font": {"size": 11.5}, "itemsizing": "trace", "itemclick": False}
    return look | {"legend": legend, "xaxis": theme.axis(), "yaxis": theme.axis()}


def _columns(info: FrontInfo) -> tuple[list[float], list[float]]:
    dots = [*info.complete, *info.running, *info.pruned]
    hopes = [dot.best for dot in info.running if dot.best is not None]
    return [dot.x for dot in dots], [*(dot.y for dot in dots), *hopes]


def _axis(objective: str, *values: float) -> Spec:
    title = {"text": title_of(objective), "standoff": 6, "font": {"size": 12}}
    low, high = min(values, default=0.0), max(values, default=1.0)
    if objective != ORDER and is_wide(values):
        return {
            "title": title,
            "type": "log",
            "range": [log10(low / 1.12), log10(high * 1.12)],
            **log_ticks(low, high, objective),
        }
    room = 0.07 * (high - low) or 0.5 * abs(high) or 1.0
    return {
        "title": title, "type": "linear", "range": [low - room, high + room], "tickmode": "auto",
        **({"tickformat": ".0%" if high - low > 0.08 else ".1%"} if objective == "error" else {}),
        **({"ticksuffix": "B"} if objective in {"bytes", "memory"} else {}),
        **({"tickformat": "d", "nticks": min(10, 2 + int(high - low))} if objective == ORDER else {}),
    }  # fmt: skip


def is_wide(values: Sequence[float]) -> bool:
    """Return whether an axis for these values is logarithmic."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= WIDE


def log_ticks(low: float, high: float, objective: str = "") -> Spec:
    """Return settings of a logarithmic axis with a few ticks at round values, in the objective's unit."""
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 60 else (1, 3) if high / low < 1e3 else (1,)
    values = [step * 10.0**decade for decade in decades for step in steps]
    return {
        "tickmode": "array",
        "tickvals": values,
        "ticktext": [_tick(objective, value) for value in values],
    }


def _tick(objective: str, value: float) -> str:
    if objective == "error":
        return f"{100 * value:g}%"
    return f"{_si(value)}{'B' * (objective in {'bytes', 'memory'})}"


def _si(value: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:g}{letter}"
    return f"{value:g}"


def _marks(dots: Sequence[Dot], name: str, marker: Spec, **more: Any) -> Spec:
    return {
        "type": "scatter", "mode": "markers", "name": name,
        "x": [dot.x for dot in dots], "y": [dot.y for dot in dots], "customdata": [dot.number for dot in dots],
        "text": [dot.text for dot in dots], "hovertemplate": "%{text}<extra></extra>", "marker": marker, **more,
    }  # fmt: skip


def _complete(info: FrontInfo, *, is_front: bool) -> Spec:
    dots = [dot for dot in info.complete if dot.is_front == is_front]
    marker: Spec = {"size": 13 if is_front else 9, "opacity": 1.0 if is_front else 0.7}
    marker["line"] = {"width": 1.8, "color": LINE} if is_front else {"width": 1, "color": theme.GREY}
    colours = [dot.colour for dot in info.complete if dot.colour is not None and dot.colour > 0]
    if colours and len(set(colours)) > 1:
        marker |= {
            "color": [None if not dot.colour else log10(dot.colour) for dot in dots], "colorscale": SCALE,
            "cmin": log10(min(colours)), "cmax": log10(max(colours)),
            **({"colorbar": _bar(info.colour, colours)} if is_front else {}),
        }  # fmt: skip
    else:
        marker["color"] = "#5f6fd6"
    return _marks(dots, "on the front" if is_front else "dominated", marker)


def _bar(objective: str, values: Sequence[float]) -> Spec:
    low, high = log10(min(values)), log10(max(values))
    places = [low + (high - low) * part for part in (0, 0.5, 1)]
    return {
        "title": {"text": title_of(objective), "side": "right", "font": {"size": 11}},
        "thickness": 9, "outlinewidth": 0,
        "tickvals": places, "ticktext": [objective_text(objective, 10**place) for place in places], "len": 0.94,
        "tickfont": {"size": 10.5}, "x": 1.01, "xpad": 2,
    }  # fmt: skip


def _line(info: FrontInfo) -> Spec:
    return {
        "type": "scatter", "mode": "lines", "name": "front", "x": [x for x, _ in info.line],
        "y": [y for _, y in info.line], "line": {"color": LINE, "width": 2, "shape": "hv"}, "hoverinfo": "skip",
        "showlegend": False,
    }  # fmt: skip


def _running(info: FrontInfo) -> Spec:
    marker = {"symbol": "diamond-open", "size": 12, "color": RUNNING, "line": {"width": 2.2}}
    return _marks(info.running, "running", marker)


def _hopes(info: FrontInfo) -> list[Spec]:
    dots = [dot for dot in info.running if dot.best is not None]
    gap: list[float | None] = [None]
    ends = [v for dot in dots for v in (dot.y, dot.best, *gap)]
    line = {
        "type": "scatter", "mode": "lines", "x": [v for dot in dots for v in (dot.x, dot.x, *gap)], "y": ends,
        "line": {"color": RUNNING, "width": 1.4, "dash": "dot"}, "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip
    tips = _marks(
        [_hope(dot, info.y, dot.best) for dot in dots if dot.best is not None],
        "could reach", {"symbol": "triangle-down-open", "size": 9, "color": RUNNING, "line": {"width": 1.6}},
    )  # fmt: skip
    return [line, tips]


def _hope(dot: Dot, objective: str, best: float) -> Dot:
    return dot._replace(y=best, text=f"{dot.text}<br>could still reach {objective_text(objective, best)}")


def _pruned(info: FrontInfo) -> Spec:
    return _marks(
        info.pruned,
        "pruned",
        {"symbol": "x-thin", "size": 8, "opacity": 0.9, "line": {"width": 2, "color": PRUNED}},
    )


def _rings(info: FrontInfo) -> list[Spec]:
    dots = [*info.complete, *info.running, *info.pruned]
    kept = (
        ("pinned", "star", 9, 0.0, [dot for dot in dots if dot.is_pinned]),
        ("chosen", "circle-open", 21, 2.4, [dot for dot in dots if dot.number == info.chosen]),
    )
    return [
        {
            "type": "scatter", "mode": "markers", "name": name,
            "x": [dot.x for dot in some], "y": [dot.y for dot in some],
            "hoverinfo": "skip", "marker": {"symbol": symbol, "size": size, "color": CHOSEN if width else "#ffffff",
                                            "line": {"width": width or 1, "color": CHOSEN}},
        }
        for name, symbol, size, width, some in kept
    ]  # fmt: skip
