"""Difference of each run's losses from those of one process: one dot per run, and the bound for rounding errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.figures import figure_text
from shardscope_widgets.figures import theme

_ROW_PX, _FRAME_PX = 26, 96
_IDENTICAL = 1e-9
"""Position of a run with identical losses, because a logarithmic axis has no zero."""


_SMALL = 1e-3
"""Relative differences below this are written as powers of ten; of larger ones, both losses are written."""


class AgreementRow(NamedTuple):
    """One run: its name, its strategy, and the largest relative difference between its losses and a single
    process's.

    `losses` are the two losses that differ by so much: the run's, and that of the single process.
    """

    label: str
    strategy: str
    difference: float
    agrees: bool
    losses: tuple[float, float]


class AgreementInfo(NamedTuple):
    """Runs in the order in which they are drawn, and the largest relative difference that counts as rounding."""

    rows: tuple[AgreementRow, ...]
    bound: float


def agreement_info(rows: Sequence[AgreementRow], bound: float) -> AgreementInfo:
    """Return the data of the figure, the run with the largest difference last."""
    return AgreementInfo(tuple(sorted(rows, key=lambda row: row.difference)), bound)


def draw_agreement(info: AgreementInfo) -> go.Figure:
    """Draw one dot per run on a logarithmic axis; rounding errors explain differences in the shaded area."""
    places = [max(row.difference, _IDENTICAL) for row in info.rows]
    looks = [theme.strategy_colour(row.strategy) for row in info.rows]
    marks = ["circle" if row.agrees else "x" for row in info.rows]
    dots = go.Scatter(
        x=places, y=[row.label for row in info.rows], mode="markers+text", showlegend=False, cliponaxis=False,
        marker={"size": 11, "color": looks, "symbol": marks}, text=[_value_text(row) for row in info.rows],
        textposition=["middle left" if place > info.bound else "middle right" for place in places],
        hovertemplate="<b>%{y}</b>: %{text}<extra></extra>",
    )  # fmt: skip
    lowest, highest = _IDENTICAL / 3, max(1.0, *(3 * place for place in places), 10 * info.bound)
    shade = {
        "type": "rect", "xref": "x", "x0": lowest, "x1": info.bound, "yref": "paper", "y0": 0, "y1": 1,
        "fillcolor": "rgba(17,153,122,0.13)", "line": {"width": 0}, "layer": "below",
    }  # fmt: skip
    figure = go.Figure(dots)
    figure.update_layout(
        xaxis=theme.axis("largest relative difference of the loss", type="log",
                         tickformat=".0e", nticks=6, range=[math.log10(lowest), math.log10(highest)]),
        yaxis=theme.axis(autorange="reversed", type="category", showgrid=False, fixedrange=True),
        shapes=[shade],
        annotations=[theme.note("rounding", x=0.01, y=1) | {"font": {"size": 12, "color": theme.GREY}}],
    )  # fmt: skip
    return theme.style(figure, height=_FRAME_PX + _ROW_PX * max(2, len(info.rows)))


def _value_text(row: AgreementRow) -> str:
    if not row.difference:
        return " identical "
    if row.difference < _SMALL:
        return f" {row.difference:.0e} "
    loss, theirs = (figure_text("loss", each) for each in row.losses)
    return f" {loss} vs {theirs} "
