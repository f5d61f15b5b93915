"""Scaling-efficiency plots of the communication calculator."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from shardscope.analytic.communication import ALGORITHMS
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._communication import (
    CommunicationQuestion,
    Efficiency,
    EfficiencyInfo,
    Floats,
    efficiency_info,
)
from shardscope_widgets.figures._communication_look import (
    HALVES,
    drawn,
    heading,
    here_line,
    line_trace,
    title,
    worker_ticks,
    wrapped,
)
from shardscope_widgets.words import duration_text, listed, plural


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
        f"<b>{title(line.algorithm)}: %{{y:.1%}}</b> of the ideal on %{{x}} workers, "
        f"a speed-up of %{{customdata:.3~r}}<br>{name} scaling: {c} / ({c} + e), with computing c = {computing}"
        f"<br>and exposed communication e = max(0, time − {question.overlap:.0%} of {c}), where time is<br>"
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
            heading("weak scaling: equal batch per worker", HALVES[0][0]),
            heading("strong scaling: one batch for all", HALVES[1][0]),
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
        return "Efficiency is defined for an all-reduce of gradients: tick an algorithm that implements it."
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
