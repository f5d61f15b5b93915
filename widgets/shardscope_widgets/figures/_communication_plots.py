"""The communication calculator's curves: time and traffic against workers or message size, and scaling efficiency.

Traces are plain dictionaries: a live figure accepts them unchanged, and validation by Plotly would take longer than
evaluating the formulas. Hovering over a point shows the formula, its inputs and its source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from shardscope.analytic.communication import ALGORITHMS, Crossing
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._communication import (
    LARGEST,
    SMALLEST,
    CommunicationQuestion,
    CostCurvesInfo,
    Efficiency,
    EfficiencyInfo,
    Floats,
    by_size_info,
    by_workers_info,
    efficiency_info,
)
from shardscope_widgets.figures._communication_look import (
    HALVES,
    LOOKS,
    drawn,
    heading,
    here_line,
    line_trace,
    log_ticks,
    tick_seconds,
    title,
    worker_ticks,
    wrapped,
)
from shardscope_widgets.words import bytes_text, duration_text, listed, plural


def curve_traces(info: CostCurvesInfo) -> list[dict[str, Any]]:
    """Return lines for the time and the traffic of each algorithm, and markers where the fastest algorithm changes."""
    by_size = bool(info.lines) and _is_by_size(info)
    traces = []
    for line in info.lines:
        hover = _hover(info.question, line.algorithm, by_size=by_size)
        split = np.stack([line.latency_s, line.bandwidth_s], axis=-1).tolist()
        traces.append(
            line_trace(line.algorithm, line.x, line.seconds, "x", hovertemplate=hover, customdata=split)
        )
        volume = f"<b>{title(line.algorithm)}: %{{y:.3~s}}B</b> from the busiest worker<extra></extra>"
        traces.append(line_trace(line.algorithm, line.x, line.sent_bytes, "x2", hovertemplate=volume))
    return [*traces, _markers(info.crossings, by_size=by_size), *_you_are_here(info, by_size=by_size)]


def _is_by_size(info: CostCurvesInfo) -> bool:
    return bool(info.lines[0].x[-1] == LARGEST)


def _hover(question: CommunicationQuestion, name: str, *, by_size: bool) -> str:
    algorithm = ALGORITHMS[name]
    own = {**algorithm.options, **question.options.get(name, {})}
    settings = ", ".join(
        f"{key} = {_setting(key, value)}" for key, value in own.items() if not _is_unset(value)
    )
    what = (
        f"message size S = %{{x:.3~s}}B, workers W = {question.workers}"
        if by_size
        else f"message size S = {bytes_text(question.num_bytes)}, workers W = %{{x}}"
    )
    link = f"latency α = {duration_text(question.latency)}, bandwidth B = {bytes_text(question.bandwidth)}/s"
    lines = [
        f"<b>{algorithm.title}: %{{y:.3~s}}s</b>",
        "= latency %{customdata[0]:.3~s}s + transfer %{customdata[1]:.3~s}s",
        wrapped(algorithm.formulas.get(question.op, ""), 70),
        f"{what}, {link}" + (f"<br>{settings}" if settings else ""),
        f"<i>{wrapped(algorithm.source, 80)}</i>",
    ]
    return "<br>".join(lines) + "<extra></extra>"


def _is_unset(value: Any) -> bool:
    return value is None or (hasattr(value, "default") and value.default is None)


def _setting(key: str, value: Any) -> str:
    value = getattr(value, "default", value)
    if key == "inner_bandwidth":
        return f"{bytes_text(value)}/s"
    if key in {"inner_latency", "reconfiguration"}:
        return duration_text(value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value:g}"


def _markers(crossings: Sequence[Crossing], *, by_size: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "fastest algorithm changes here",
        "showlegend": bool(crossings),
        "text": [f"<b>{number}</b>" for number in range(1, len(crossings) + 1)],
        "textposition": "bottom center",
        "x": [crossing.value for crossing in crossings],
        "y": [crossing.seconds for crossing in crossings],
        "xaxis": "x",
        "yaxis": "y",
        "marker": {
            "symbol": "diamond",
            "size": 11,
            "color": theme.GREY,
            "line": {"color": "#fff", "width": 1.5},
        },
        "hovertext": [f"{crossing_text(crossing, by_size=by_size)}." for crossing in crossings],
        "hoverinfo": "text",
    }


def crossing_text(crossing: Crossing, *, by_size: bool) -> str:
    """Describe a crossing as ``ring becomes faster than tree at 710 kB``."""
    where = _place(crossing, by_size=by_size)
    return f"{title(crossing.above)} becomes faster than {title(crossing.below)} at {where}"


def _place(crossing: Crossing, *, by_size: bool) -> str:
    return bytes_text(crossing.value) if by_size else f"{crossing.value:.0f} workers"


def _you_are_here(info: CostCurvesInfo, *, by_size: bool) -> list[dict[str, Any]]:
    """Return dots on the lines at the current values of the controls."""
    here = info.question.num_bytes if by_size else float(info.question.workers)
    dots = []
    for axis, pick in (("x", "seconds"), ("x2", "sent_bytes")):
        points = [
            (_at(here, line.x, getattr(line, pick)), line)
            for line in info.lines
            if (line.x[0] <= here <= line.x[-1] if by_size else here in line.x)
        ]
        dots.append(
            {
                "type": "scatter",
                "mode": "markers",
                "showlegend": False,
                "hoverinfo": "skip",
                "x": [here] * len(points),
                "y": [y for y, _ in points],
                "xaxis": axis,
                "yaxis": axis.replace("x", "y"),
                "marker": {"size": 8, "color": [LOOKS[line.algorithm].colour for _, line in points]},
            }
        )
    return dots


def _at(here: float, x: Floats, y: Floats) -> float:
    """Return the value at `here` of a line on two logarithmic axes."""
    return float(np.exp(np.interp(np.log(here), np.log(x), np.log(np.maximum(y, 1e-300)))))


def curve_layout(info: CostCurvesInfo) -> dict[str, Any]:
    """Return axes, headings and the list of crossings."""
    by_size = bool(info.lines) and _is_by_size(info)
    question = info.question
    x = (
        log_ticks(SMALLEST, LARGEST, bytes_text) | {"range": [3, 11]}
        if by_size
        else worker_ticks(question.workers)
    )
    what = "message size" if by_size else "workers"
    room = 4.0 ** min(len(info.crossings), 4)  # space above the curves for the list of crossings
    seconds = _log_range([line.seconds for line in info.lines], tick_seconds, room)
    volume = _log_range([line.sent_bytes for line in info.lines], bytes_text)
    place = question.num_bytes if by_size else question.workers
    return {
        "xaxis": theme.axis(what, domain=HALVES[0], anchor="y", **x),
        "xaxis2": theme.axis(what, domain=HALVES[1], anchor="y2", **x),
        "yaxis": theme.axis("", anchor="x", **seconds),
        "yaxis2": theme.axis("", anchor="x2", **volume),
        "annotations": [
            heading("time", HALVES[0][0]),
            heading("bytes sent by the busiest worker", HALVES[1][0]),
            *_names(info.crossings, by_size=by_size),
        ],
        "shapes": [here_line(place, axis) for axis in ("", "2")],
    }


def _names(crossings: Sequence[Crossing], *, by_size: bool) -> list[dict[str, Any]]:
    """Return the legend of the numbered diamonds: a list of crossings in the upper left, where there are no curves."""
    lines = [
        f"◆<b>{n}</b> {title(crossing.above)} is fastest from {_place(crossing, by_size=by_size)} on"
        for n, crossing in enumerate(crossings, 1)
    ]
    if not lines:
        return []
    look = {"align": "left", "xanchor": "left", "yanchor": "top", "font": {"size": 11, "color": theme.GREY}}
    return [theme.note("<br>".join(lines), x=0.012, y=0.985) | look]


def _log_range(curves: Sequence[Floats], text: Callable[[float], str], room: float = 1.0) -> dict[str, Any]:
    values = np.concatenate([[1.0], *[curve[curve > 0] for curve in curves]])[1:]
    if not values.size:
        return {"type": "log", "range": [0, 1]}
    low, high = values.min() / 1.6, values.max() * 1.6 * room
    return log_ticks(low, high, text) | {"range": [float(np.log10(low)), float(np.log10(high))]}


def by_size(question: CommunicationQuestion) -> go.Figure:
    """Draw time and traffic against message size, with a diamond where the fastest algorithm changes."""
    info = by_size_info(question)
    return drawn(curve_traces(info), curve_layout(info))


def by_workers(question: CommunicationQuestion) -> go.Figure:
    """Draw time and traffic against the number of workers, with a diamond where the fastest algorithm changes."""
    info = by_workers_info(question)
    return drawn(curve_traces(info), curve_layout(info))


def curves_text(info: CostCurvesInfo) -> str:
    """Describe the curves: the fastest algorithm at the values of the controls, and where it changes."""
    if not info.lines:
        return "Tick an algorithm to compare."
    by_size = _is_by_size(info)
    here = info.question.num_bytes if by_size else float(info.question.workers)
    at = [
        (_at(here, line.x, line.seconds), line.algorithm) for line in info.lines if by_size or here in line.x
    ]
    where = f"{bytes_text(info.question.num_bytes)} among {plural(info.question.workers, 'worker')}"
    if at:
        least = duration_text(min(seconds for seconds, _ in at))
        fastest = listed(title(name) for seconds, name in at if duration_text(seconds) == least)
        is_or_are = "are" if " and " in fastest else "is"
        words = [f"For {where}, {fastest} {is_or_are} the fastest of these algorithms: {least}."]
    else:
        words = [f"For {where}, none of these algorithms can run."]
    if info.crossings:
        told = listed(crossing_text(c, by_size=by_size) for c in info.crossings)
        words.append(f"{told[0].upper()}{told[1:]}.")
    else:
        words.append("It is the fastest over the whole range shown." if at and len(info.lines) > 1 else "")
    words += [f"Left out: {title(left.algorithm)} ({left.why})." for left in info.left_out]
    return " ".join(filter(None, words))


by_size_text = by_workers_text = curves_text


def efficiency_traces(info: EfficiencyInfo) -> list[dict[str, Any]]:
    """Return two lines for each algorithm: weak and strong scaling efficiency."""
    return [
        _efficiency_trace(info.question, line, values, axis)
        for line in info.lines
        for axis, values in (("x", line.weak), ("x2", line.strong))
    ]


def _efficiency_trace(
    question: CommunicationQuestion, line: Efficiency, values: Floats, axis: str
) -> dict[str, Any]:
    computing = duration_text(question.compute_s)
    c, name = ("c", "weak") if axis == "x" else ("c/W", "strong")
    hover = (
        f"<b>{title(line.algorithm)}: %{{y:.1%}}</b> of the ideal speed-up on %{{x}} workers, "
        f"which is %{{customdata:.3~r}} ×<br>{name} scaling: {c} / ({c} + e), with compute time c = {computing}"
        f"<br>and exposed communication time e = max(0, time − {question.overlap:.0%} of {c}), where time is<br>"
        f"{wrapped(ALGORITHMS[line.algorithm].formulas['all_reduce'], 70)}<extra></extra>"
    )
    speed_up = (values * line.workers).tolist()
    return line_trace(line.algorithm, line.workers, values, axis, customdata=speed_up, hovertemplate=hover)


def efficiency_layout(info: EfficiencyInfo) -> dict[str, Any]:
    """Return axes, headings and the marker line."""
    x = worker_ticks(info.question.workers)
    y = {"range": [0, 1.04], "tickformat": ".0%", "tickvals": [0, 0.25, 0.5, 0.75, 1]}
    return {
        "xaxis": theme.axis("workers", domain=HALVES[0], anchor="y", **x),
        "xaxis2": theme.axis("workers", domain=HALVES[1], anchor="y2", **x),
        "yaxis": theme.axis("", anchor="x", **y),
        "yaxis2": theme.axis("", anchor="x2", **y),
        "annotations": [
            heading("weak scaling: fixed batch per worker", HALVES[0][0]),
            heading("strong scaling: fixed global batch", HALVES[1][0]),
        ],
        "shapes": [here_line(info.question.workers, axis) for axis in ("", "2")],
    }


def efficiency(question: CommunicationQuestion) -> go.Figure:
    """Draw weak and strong scaling efficiency against the number of workers."""
    info = efficiency_info(question)
    return drawn(efficiency_traces(info), efficiency_layout(info))


def efficiency_text(info: EfficiencyInfo) -> str:
    """Describe the best weak and strong scaling efficiency at the chosen number of workers."""
    if not info.lines:
        return "Scaling efficiency is defined for an all-reduce of gradients: tick an algorithm that implements it."
    count = info.question.workers
    here = [line for line in info.lines if count in line.workers]
    if not here:
        return f"None of these algorithms can run with {plural(count, 'worker')}."
    kept = []
    for kind in ("weak", "strong"):
        at = [(float(getattr(line, kind)[line.workers == count][0]), line.algorithm) for line in here]
        most = max(value for value, _ in at)
        best = listed(title(name) for value, name in at if f"{value:.1%}" == f"{most:.1%}")
        kept.append(f"{most:.0%} ({kind} scaling, {best})")
    return f"On {plural(count, 'worker')}, the best of these algorithms reach {listed(kept)} of the ideal speed-up."
