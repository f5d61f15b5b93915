"""Step times of several jobs: predicted and simulated before they run, and measured beside them afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures._predicted import LOOKS
from shardscope_widgets.words import duration_text

_ROW_PX, _FRAME_PX = 26, 92


class StepTimesRow(NamedTuple):
    """One job: its name, and its step times in seconds; None for those that are not known."""

    label: str
    predicted: float | None
    simulated: float | None = None
    measured: float | None = None


def step_times(rows: Sequence[StepTimesRow]) -> go.Figure:
    """Draw a bar for each step time that is known, grouped by job in the order of `rows`.

    Example:
        >>> step_times([StepTimesRow("ring", ss.predict(job).step_time_s)])  # doctest: +SKIP
    """
    columns = [name for name in LOOKS if any(getattr(row, name, None) is not None for row in rows)]
    figure = go.Figure([_bars(rows, name) for name in columns])
    figure.update_layout(
        xaxis=theme.axis(tickformat="~s", ticksuffix="s", rangemode="tozero", nticks=6),
        yaxis=theme.axis(
            autorange="reversed", type="category", showgrid=False, fixedrange=True, ticklabelstandoff=6
        ),
    )
    height = _FRAME_PX + _ROW_PX * max(1, len(columns)) * len(rows)
    return theme.style(
        figure, height=height, barmode="group", legend=theme.LEGEND_ABOVE, bargroupgap=0.06,
        margin={"l": 8, "r": 70, "t": 44, "b": 8},
    )  # fmt: skip


def _bars(rows: Sequence[StepTimesRow], name: str) -> go.Bar:
    values = [getattr(row, name) for row in rows]
    texts = ["" if value is None else f" {duration_text(value)}" for value in values]
    return go.Bar(
        x=values, y=[row.label for row in rows], orientation="h", name=name, text=texts, textposition="outside",
        textfont={"size": 11, "color": theme.GREY}, cliponaxis=False,
        marker=theme.striped(LOOKS[name], size=5, solidity=0.25),
        hovertemplate=f"<b>%{{y}}</b>, {name}:%{{text}}<extra></extra>",
    )  # fmt: skip
