"""Drawing of the timeline of faults: steps over time above, and one row for each rank below, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures._faults import (
    DETECTION,
    LOST,
    RESIZE,
    RESTART,
    START,
    TRAINING,
    FaultBar,
    FaultsInfo,
    Incident,
    Resized,
    faults_info,
)
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import duration_text, plural

LOOKS = {
    START: RunStyle("#c3c7cf"),
    TRAINING: RunStyle("#5aa9e6"),
    RESIZE: RunStyle("#9a86cf", pattern="-"),
    LOST: RunStyle("#e06c2c", pattern="/"),
    DETECTION: RunStyle("#c5372c", pattern="x"),
    RESTART: RunStyle("#8b8f99", pattern="."),
}
"""Styles of the bars, in the order of the legend."""
_FAILURE, _OTHER, _SAVED = "#c5372c", "#b866a6", "#11997a"
_OTHERS = {"slow": "slow rank", "drop-link": "dropped link", "fill-disk": "full disk"}
"""Names of faults that do not end an attempt by themselves, by their kind."""
_STEPS_PX, _GAP_PX, _HEAD_PX, _FOOT_PX = 150, 34, 44, 46
_LOW = 0.2
"""Step number, as a fraction of the last step, below which there is no space for a note under the curve."""
MOST_NOTES = 6
"""Maximum number of failures, and of resizes, that are labelled in the figure; more labels would overlap."""


def faults_parts(info: FaultsInfo) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the traces and the layout of the figure."""
    kinds = [kind for kind in LOOKS if any(bar.kind == kind for bar in info.bars)]
    bars = [_bar_trace(kind, [bar for bar in info.bars if bar.kind == kind]) for kind in kinds]
    return [*bars, *_lines(info), *_checkpoints(info), *_failures(info)], _layout(info)


def _bar_trace(kind: str, bars: Sequence[FaultBar]) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "name": kind, "showlegend": True, "legendgroup": kind,
        "base": [bar.start_s for bar in bars], "x": [bar.end_s - bar.start_s for bar in bars],
        "y": [bar.rank for bar in bars], "width": 0.72,
        "marker": theme.striped(LOOKS[kind], size=5, solidity=0.25) | {"line": {"width": 0}},
        "hovertext": [_hover(bar) for bar in bars], "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def _hover(bar: FaultBar) -> str:
    length = duration_text(bar.end_s - bar.start_s)
    steps = "" if not bar.last_step else f"<br>steps {bar.first_step} to {bar.last_step}"
    return f"<b>{bar.kind}</b>, {length}<br>rank {bar.rank}{steps}"


def _lines(info: FaultsInfo) -> list[dict[str, Any]]:
    """Return steps over time: a solid line for steps that were kept, a dotted line for lost steps."""
    found = []
    for line in info.progress:
        cut = sum(step <= line.kept for step in line.steps)
        kept, lost = slice(0, cut), slice(max(0, cut - 1), None)
        parts = [(kept, LOOKS[TRAINING].colour, "solid", TRAINING)]
        if cut < len(line.steps):
            parts.append((lost, LOOKS[LOST].colour, "dot", LOST))
        found += [
            {
                "type": "scatter", "mode": "lines", "name": kind, "yaxis": "y2",
                "x": list(line.times_s[part]), "y": list(line.steps[part]),
                "line": {"color": colour, "dash": dash, "width": 2.6}, "showlegend": False,
                "hovertemplate": f"step %{{y}} after %{{x:.1f}} s, {kind}<extra></extra>",
            }
            for part, colour, dash, kind in parts
        ]  # fmt: skip
    return found


def _checkpoints(info: FaultsInfo) -> list[dict[str, Any]]:
    """Return a diamond for each checkpoint, filled where training continued from it after a failure."""
    used = {each.resumed: each for each in info.incidents if each.resumed}
    places = dict(info.saved)
    for step in used:
        at = info.reached_s(step)
        if step not in places and at is not None:
            places[step] = at
    found = []
    for name, symbol, steps in (
        ("checkpoint", "diamond-open", [step for step in places if step not in used]),
        ("resumed from", "diamond", [step for step in places if step in used]),
    ):
        about = [
            f"checkpoint of step {step}"
            + (f"<br>training continued from it, from {used[step].source}" if step in used else "")
            for step in steps
        ]
        look = {"symbol": symbol, "size": 9, "color": _SAVED, "line": {"width": 1.5, "color": _SAVED}}
        found.append(_points(name, look, [(places[step], step) for step in steps], about) | {"yaxis": "y2"})
    return [trace for trace in found if trace["x"]]


def _failures(info: FaultsInfo) -> list[dict[str, Any]]:
    """Return a cross for each failure and a triangle for each other injected fault, in the row of the rank."""
    failed = [(each, each.rank) for each in info.incidents if each.rank is not None]
    crosses = _points(
        "failure", _look("x", _FAILURE), [(each.failed_s, rank) for each, rank in failed],
        [f"<b>{each.cause}</b><br>{_recovery(each)}" for each, _ in failed],
    )  # fmt: skip
    triangles = [
        _points(
            name, _look("triangle-down", _OTHER), [(each.at_s, each.rank) for each in info.marks if each.kind == kind],
            [each.text for each in info.marks if each.kind == kind],
        )
        for kind, name in _OTHERS.items()
    ]  # fmt: skip
    return [trace for trace in (crosses, *triangles) if trace["x"]]


def _look(symbol: str, colour: str) -> dict[str, Any]:
    return {"symbol": symbol, "size": 12, "color": colour, "line": {"width": 1.5, "color": "#ffffff"}}


def _points(
    name: str, look: dict[str, Any], places: Sequence[tuple[float, int]], about: Sequence[str]
) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": name, "showlegend": True, "marker": look,
        "x": [x for x, _ in places], "y": [y for _, y in places],
        "hovertext": list(about), "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def _recovery(incident: Incident) -> str:
    lost = f"{plural(incident.num_lost, 'step')} lost"
    if incident.again_s is None:
        return f"{lost}; not training again yet"
    return f"{lost}; training again after {duration_text(incident.again_s - incident.failed_s)}"


def _layout(info: FaultsInfo) -> dict[str, Any]:
    rows = min(34, max(14, 300 // max(1, info.world_size))) * max(1, info.world_size)
    inner = _STEPS_PX + _GAP_PX + rows
    most = _most(info)
    shown = info.incidents if len(info.incidents) <= MOST_NOTES else ()
    resized = info.resizes if len(info.resizes) <= MOST_NOTES else ()
    return {
        "height": inner + _HEAD_PX + _FOOT_PX,
        "xaxis": theme.axis("seconds since the start", range=[0, max(info.end_s, 0.1) * 1.01], anchor="y"),
        "yaxis": theme.axis(
            showgrid=False, fixedrange=True, domain=[0, rows / inner], tickvals=list(range(info.world_size)),
            ticktext=[f"rank {rank} " for rank in range(info.world_size)], range=[info.world_size - 0.5, -0.5],
        ),
        "yaxis2": theme.axis(
            "step", fixedrange=True, domain=[1 - _STEPS_PX / inner, 1], anchor="x", range=[0, most * 1.3], nticks=5,
            dtick=1 if most < 5 else None,
        ),
        "shapes": [theme.rule(_FAILURE, x=each.failed_s, width=1.2, dash="dot") for each in shown]
        + [theme.rule(theme.AXIS, x=each.at_s, width=1.2, dash="dot") for each in resized]
        + [_on((each.failed_s, each.last_step), (each.again_s, each.resumed)) for each in shown if each.again_s]
        + [_on((each.at_s, each.step), (each.again_s, each.step)) for each in info.resizes if each.again_s],
        "annotations": [*(_note(each, info) for each in shown), *(_size(each, info) for each in resized)],
    }  # fmt: skip


def _on(last: tuple[float, int], again: tuple[float, int]) -> dict[str, Any]:
    """Return a line from the last step before a failure or resize to the step from which training continued."""
    return {
        "type": "line", "xref": "x", "yref": "y2", "x0": last[0], "y0": last[1], "x1": again[0], "y1": again[1],
        "line": {"color": theme.AXIS, "width": 1.4, "dash": "dash"},
    }  # fmt: skip


def _note(incident: Incident, info: FaultsInfo) -> dict[str, Any]:
    """Return a note at the top of the failure's line: what failed, and how many steps were lost."""
    who = "failure" if incident.rank is None else f"rank {incident.rank} failed"
    text = f"<b>{who}</b><br>{plural(incident.num_lost, 'step')} lost"
    return theme.note(text, x=incident.failed_s, y=1) | {"yanchor": "top", **_beside(incident.failed_s, info)}


def _size(resized: Resized, info: FaultsInfo) -> dict[str, Any]:
    """Return a note with the new number of ranks: below the curve, or just above it where the curve is low."""
    is_low = resized.step < _LOW * _most(info)
    y, yref = (resized.step, "y2") if is_low else (0, "y2 domain")
    note = theme.note(plural(resized.after, "rank"), x=resized.at_s, y=y)
    return note | {"yref": yref, "yshift": 2 * is_low, **_beside(resized.at_s, info)}


def _most(info: FaultsInfo) -> int:
    return max((line.steps[-1] for line in info.progress if line.steps), default=1)


def _beside(at_s: float, info: FaultsInfo) -> dict[str, Any]:
    """Return the settings that place a note next to a line at this time, on the side that has space."""
    is_late = at_s > 0.75 * info.end_s
    side = {"xanchor": "right", "xshift": -5} if is_late else {"xanchor": "left", "xshift": 5}
    font = {"size": 11.5, "color": theme.GREY}
    return {"xref": "x", "align": "right" if is_late else "left", "font": font, **side}


def empty_faults() -> go.Figure:
    """Return the figure without data, as the template of a live figure."""
    return theme.style(go.Figure(), height=_HEAD_PX + _FOOT_PX + _STEPS_PX, barmode="overlay", head=_HEAD_PX)


def draw_faults(info: FaultsInfo) -> go.Figure:
    """Draw the figure for `info`."""
    traces, layout = faults_parts(info)
    figure = empty_faults()
    figure.add_traces(traces)
    return figure.update_layout(layout)


def faults(trace: Trace) -> go.Figure:
    """Draw when each rank of a run trained, failed and trained again, and which steps were lost.

    Example:
        >>> faults(Trace.read(run))  # doctest: +SKIP
    """
    return draw_faults(faults_info(trace))
