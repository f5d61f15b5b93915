"""Horizontal stacked bars, one per rank, with runs one below the other under headings.

Used for memory by type and for bytes by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.words import bytes_text, safe

_HEAD_PX, _FOOT_PX, _ROW_PX, _FEWEST_PX = 72, 36, 24, 17
_ROOMY = 30
"""Number of rows above which rows are drawn closer together."""


class StackBar(NamedTuple):
    """The bar of one rank: its name, and the bytes in each layer of the stack."""

    name: str
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Total bytes of all layers."""
        return sum(self.sizes)


class RunBars(NamedTuple):
    """The bars of one run's ranks, and the predicted bars (empty if unknown), which are drawn fainter below."""

    label: str
    bars: tuple[StackBar, ...]
    predicted: tuple[StackBar, ...] = ()

    @property
    def most(self) -> int:
        """Bytes of the largest bar; 0 without bars."""
        return max((bar.total for bar in self.bars), default=0)


Row = tuple[float, StackBar]
"""(vertical position from the top, bar)."""


def draw_stacks(
    groups: Sequence[RunBars], layers: Sequence[tuple[str, RunStyle]], *, line: tuple[int, str] | None = None
) -> go.Figure:
    """Draw bars stacked by layer, with the total at the end of each bar.

    Args:
        groups: One group of bars per run.
        layers: (name, style) of each layer, in the order of `StackBar.sizes`.
        line: (bytes, label) of a value to mark with a dashed line.
    """
    rows, headings = _rows(groups)
    figure = go.Figure([_layer(index, name, look, rows) for index, (name, look) in enumerate(layers)])
    figure.add_traces(_ghosts(groups, rows, layers))
    figure.add_trace(_totals(rows))
    most = max(
        [line[0] if line else 0, *(bar.total for g in groups for bar in (*g.bars, *g.predicted))], default=0
    )
    lowest = max((place for place, _ in rows), default=0) + 0.6
    figure.update_layout(
        xaxis=theme.axis(tickformat="~s", ticksuffix="B", range=[0, 1.2 * most or 1], nticks=6, tickangle=0),
        yaxis=theme.axis(
            tickvals=[place for place, _ in rows], ticktext=[f"{bar.name} " for _, bar in rows],
            range=[lowest, -0.6], showgrid=False, fixedrange=True,
        ),
        annotations=[*headings, *([_note(line)] if line else [])],
        shapes=[theme.rule(theme.GREY, x=line[0])] if line else [],
    )  # fmt: skip
    row_px = max(_FEWEST_PX, min(_ROW_PX, _ROW_PX * _ROOMY / (lowest + 0.6)))
    return theme.style(
        figure, height=round(_HEAD_PX + _FOOT_PX + row_px * (lowest + 0.6)), barmode="stack",
        head=_HEAD_PX,
    )  # fmt: skip


def _rows(groups: Sequence[RunBars]) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return the position of every bar, and a heading above each group if there is more than one."""
    rows: list[Row] = []
    headings, place, headed = [], 0.0, len(groups) > 1
    for group in groups:
        if headed:
            head = theme.note(f"<b>{safe(group.label)}</b>", x=0, y=place)
            headings.append(head | {"yref": "y", "yanchor": "middle"})
            place += 0.95
        rows += [(place + number, bar) for number, bar in enumerate(group.bars)]
        place += len(group.bars) + 0.25 * headed
    return rows, headings


def _ghosts(
    groups: Sequence[RunBars], rows: Sequence[Row], layers: Sequence[tuple[str, RunStyle]]
) -> list[Any]:
    """Return a thin, fainter predicted bar below each measured bar for which there is a prediction."""
    places = iter(place for place, _ in rows)
    paired = [(group, rank, next(places)) for group in groups for rank in range(len(group.bars))]
    thin = [
        (place + 0.44, group.predicted[rank]) for group, rank, place in paired if rank < len(group.predicted)
    ]
    bars = [_layer(index, name, look, thin) for index, (name, look) in enumerate(layers)] if thin else []
    for bar, (name, _) in zip(bars, layers, strict=False):
        hover = f"<b>predicted {name}</b>, %{{customdata[1]}}<br>%{{customdata[0]}}<extra></extra>"
        bar.update(width=0.16, opacity=0.5, showlegend=False, name=f"predicted {name}", hovertemplate=hover)
    return [*bars, theme.ghost_key()] if thin else []


def _layer(index: int, name: str, look: RunStyle, rows: Sequence[Row]) -> go.Bar:
    return go.Bar(
        x=[bar.sizes[index] for _, bar in rows],
        y=[place for place, _ in rows],
        width=0.74,
        orientation="h",
        name=name,
        marker=theme.striped(look, white=0.6, size=5, solidity=0.22) | {"line": {"width": 0}},
        customdata=[[bar.name, bytes_text(bar.sizes[index])] for _, bar in rows],
        hovertemplate=f"<b>{name}</b>, %{{customdata[1]}}<br>%{{customdata[0]}}<extra></extra>",
    )


def _totals(rows: Sequence[Row]) -> go.Scatter:
    return go.Scatter(
        x=[bar.total for _, bar in rows],
        y=[place for place, _ in rows],
        mode="text",
        text=[f" {bytes_text(bar.total)}" for _, bar in rows],
        textposition="middle right",
        hoverinfo="skip",
        showlegend=False,
        cliponaxis=False,
    )


def _note(line: tuple[int, str]) -> dict[str, Any]:
    look = {"xref": "x", "xanchor": "center", "font": {"size": 11, "color": theme.GREY}}
    return theme.note(line[1], x=line[0], y=1) | look
