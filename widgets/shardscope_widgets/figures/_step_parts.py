"""Breakdown of the step time of each run: one bar per run, stacked by part, next to the step time of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.measure.compare.measured import PARTS, REST
from shardscope_widgets.figures import theme
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.words import duration_text

_ROW_PX, _FRAME_PX = 26, 118
_LEAST_REST = 0.005
"""Fraction of a step time below which the unexplained rest is not drawn."""
_LOOKS = {
    "data": theme.SPAN_LOOKS["data"],
    "forward": theme.SPAN_LOOKS["forward"],
    "backward": theme.SPAN_LOOKS["backward"],
    "optimizer": theme.SPAN_LOOKS["optimizer"],
    "codec": theme.SPAN_LOOKS["encode"],
    "communication": theme.SPAN_LOOKS["all_reduce"],
    "idle": theme.IDLE,
    REST: RunStyle("rgba(127,132,141,0.5)", pattern="x"),
}


class StepPartsRow(NamedTuple):
    """One run: its name, the time of each of `PARTS` in a step, and its step time, all in seconds.

    The step time is the slowest rank's in each step, so it can exceed the sum of one rank's parts; the
    difference is the rest.
    """

    label: str
    seconds: Mapping[str, float]
    step_s: float


class StepPartsInfo(NamedTuple):
    """The runs in the order in which they are drawn, and the step time of one process in seconds, if known."""

    rows: tuple[StepPartsRow, ...]
    alone_s: float | None


def step_parts_info(rows: Sequence[StepPartsRow], alone_s: float | None) -> StepPartsInfo:
    """Return the data of the figure, the fastest run first, with the difference between each step time and the sum of
    its parts.
    """
    whole = (row._replace(seconds={**row.seconds, REST: _rest_s(row)}) for row in rows)
    return StepPartsInfo(tuple(sorted(whole, key=lambda row: row.step_s)), alone_s)


def _rest_s(row: StepPartsRow) -> float:
    """Return the rest of the step time; 0 if it is below what a figure shows."""
    rest = row.step_s - sum(row.seconds.values())
    return rest if rest > _LEAST_REST * row.step_s else 0.0


def draw_step_parts(info: StepPartsInfo) -> go.Figure:
    """Draw one stacked bar per run with a mark at its step time, and a dashed line at the step time of one process."""
    parts = [name for name in (*PARTS, REST) if any(row.seconds.get(name) for row in info.rows)]
    figure = go.Figure([_layer(name, _LOOKS.get(name, theme.IDLE), info.rows) for name in parts])
    figure.add_trace(_marks(info.rows))
    figure.update_layout(
        xaxis=theme.axis(tickformat="~s", ticksuffix="s", rangemode="tozero", nticks=6),
        yaxis=theme.axis(autorange="reversed", type="category", showgrid=False, fixedrange=True),
        shapes=[] if info.alone_s is None else [theme.rule(theme.GREY, x=info.alone_s)],
    )
    height = _FRAME_PX + _ROW_PX * max(2, len(info.rows))
    return theme.style(figure, height=height, barmode="stack", head=72)


def _layer(name: str, look: RunStyle, rows: Sequence[StepPartsRow]) -> go.Bar:
    seconds = [row.seconds.get(name, 0.0) for row in rows]
    return go.Bar(
        x=seconds, y=[row.label for row in rows], orientation="h", name=name, width=0.74,
        marker=theme.striped(look, white=0.6, size=5, solidity=0.22) | {"line": {"width": 0}},
        customdata=[duration_text(value) if value else "0 s" for value in seconds],
        hovertemplate=f"<b>%{{y}}</b><br>{name}: %{{customdata}}<extra></extra>",
    )  # fmt: skip


def _marks(rows: Sequence[StepPartsRow]) -> go.Scatter:
    return go.Scatter(
        x=[row.step_s for row in rows], y=[row.label for row in rows], mode="markers+text", name="step time",
        marker={"symbol": "line-ns", "size": 17, "line": {"width": 2, "color": theme.GREY}},
        text=[f" {duration_text(row.step_s)}" for row in rows], textposition="middle right",
        textfont={"size": 11, "color": theme.GREY}, cliponaxis=False,
        hovertemplate="<b>%{y}</b><br>step time:%{text}<extra></extra>",
    )  # fmt: skip
