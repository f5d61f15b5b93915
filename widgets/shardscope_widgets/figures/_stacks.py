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

STATES = ("parameters", "gradients", "optimizer")
"""The types of memory that ZeRO shards: the model states, which come first in `MEMORY_KINDS`."""
_HEAD_PX, _FOOT_PX, _ROW_PX, _FEWEST_PX = 72, 36, 24, 17
FAINT = 0.38
"""Opacity of faint layers."""
_ROOMY = 30
"""Number of rows above which rows are drawn closer together."""


class Layer(NamedTuple):
    """One layer of the stacks: its name and its style; a faint layer is drawn paler than the others."""

    name: str
    look: RunStyle
    is_faint: bool = False


class StackBar(NamedTuple):
    """The bar of one rank: its name, and the bytes in each layer of the stack.

    `peak` is the most bytes of all layers together at one time, if that is less than their total.
    """

    name: str
    sizes: tuple[int, ...]
    peak: int | None = None

    @property
    def total(self) -> int:
        """Total bytes of all layers."""
        return sum(self.sizes)

    @property
    def end(self) -> int:
        """Bytes at which the bar ends: its peak, or its total if the peak is unknown."""
        return self.total if self.peak is None else self.peak


class RunBars(NamedTuple):
    """The bars of one run's ranks, and the predicted bars (empty if unknown), which are drawn fainter below."""

    label: str
    bars: tuple[StackBar, ...]
    predicted: tuple[StackBar, ...] = ()

    @property
    def most(self) -> int:
        """Length of the longest bar, in bytes; 0 without bars."""
        return max((bar.end for bar in self.bars), default=0)


Row = tuple[float, StackBar]
"""(vertical position from the top, bar)."""


def draw_stacks(
    groups: Sequence[RunBars],
    layers: Sequence[Layer],
    *,
    line: tuple[int, str] | None = None,
    row_px: int = _ROW_PX,
    cut: int | None = None,
) -> go.Figure:
    """Draw bars stacked by layer, with the total bytes at the end of each bar.

    A bar with a peak ends there: its faint layers are shortened, because they are not all full at the same time.

    Args:
        groups: One group of bars per run; groups without a label have no heading.
        layers: The layers, in the order of `StackBar.sizes`.
        line: (bytes, label) of a value to mark with a dashed line.
        row_px: Height of a row, in pixels.
        cut: End of the axis, in bytes; longer bars are cut there and marked with an arrow. None shows all bars in full.
    """
    rows, headings = _rows(groups)
    figure = go.Figure([_layer(index, rows, layers) for index in range(len(layers))])
    figure.add_traces(_ghosts(groups, rows, layers))
    figure.add_trace(_totals(rows, cut))
    most = max(
        [line[0] if line else 0, *(bar.end for g in groups for bar in (*g.bars, *g.predicted))], default=0
    )
    lowest = max((place for place, _ in rows), default=0) + 0.6
    figure.update_layout(
        xaxis=theme.axis(tickformat="~s", ticksuffix="B", range=[0, cut or 1.2 * most or 1], nticks=6, tickangle=0),
        yaxis=theme.axis(
            tickvals=[place for place, _ in rows], ticktext=[f"{bar.name} " for _, bar in rows],
            range=[lowest, -0.6], showgrid=False, fixedrange=True,
        ),
        annotations=[*headings, *([_note(line)] if line else [])],
        shapes=[theme.rule(theme.GREY, x=line[0])] if line else [],
    )  # fmt: skip
    each_px = max(_FEWEST_PX, min(row_px, row_px * _ROOMY / (lowest + 0.6)))
    return theme.style(
        figure, height=round(_HEAD_PX + _FOOT_PX + each_px * (lowest + 0.6)), barmode="stack",
        head=_HEAD_PX,
    )  # fmt: skip


def _rows(groups: Sequence[RunBars]) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return the position of every bar, and a heading above each group if there are several with a label."""
    rows: list[Row] = []
    headings, place, headed = [], 0.0, len(groups) > 1 and any(group.label for group in groups)
    for group in groups:
        if headed:
            head = theme.note(f"<b>{safe(group.label)}</b>", x=0, y=place)
            headings.append(head | {"yref": "y", "yanchor": "middle"})
            place += 0.95
        rows += [(place + number, bar) for number, bar in enumerate(group.bars)]
        place += len(group.bars) + 0.25 * headed
    return rows, headings


def _ghosts(groups: Sequence[RunBars], rows: Sequence[Row], layers: Sequence[Layer]) -> list[Any]:
    """Return a thin, fainter predicted bar below each measured bar for which there is a prediction."""
    places = iter(place for place, _ in rows)
    paired = [(group, rank, next(places)) for group in groups for rank in range(len(group.bars))]
    thin = [
        (place + 0.44, group.predicted[rank]) for group, rank, place in paired if rank < len(group.predicted)
    ]
    bars = [_layer(index, thin, layers) for index in range(len(layers))] if thin else []
    for bar, layer in zip(bars, layers, strict=False):
        hover = f"<b>predicted {layer.name}</b>, %{{customdata[1]}}<br>%{{customdata[0]}}<extra></extra>"
        faint = FAINT if layer.is_faint else 1.0
        bar.update(
            width=0.16, opacity=0.5 * faint, showlegend=False, name=f"predicted {layer.name}", hovertemplate=hover
        )  # fmt: skip
    return [*bars, theme.ghost_key()] if thin else []


def _layer(index: int, rows: Sequence[Row], layers: Sequence[Layer]) -> go.Bar:
    name, look, is_faint = layers[index]
    return go.Bar(
        x=[_up_to_the_peak(bar, layers)[index] for _, bar in rows],
        y=[place for place, _ in rows],
        width=0.74,
        orientation="h",
        name=name,
        opacity=FAINT if is_faint else 1.0,
        marker=theme.striped(look, white=0.6, size=5, solidity=0.22) | {"line": {"width": 0}},
        customdata=[[bar.name, bytes_text(bar.sizes[index])] for _, bar in rows],
        hovertemplate=f"<b>{name}</b>, %{{customdata[1]}}<br>%{{customdata[0]}}<extra></extra>",
    )


def _up_to_the_peak(bar: StackBar, layers: Sequence[Layer]) -> list[int]:
    """Return the sizes of the layers as drawn: the amount by which the total exceeds the peak is subtracted from the
    faint layers, in order.
    """
    sizes, above = list(bar.sizes), bar.total - bar.end
    for index, layer in enumerate(layers):
        if layer.is_faint and above > 0:
            taken = min(above, sizes[index])
            sizes[index], above = sizes[index] - taken, above - taken
    return sizes


def _totals(rows: Sequence[Row], cut: int | None) -> go.Scatter:
    most = max((bar.end for _, bar in rows), default=0) if cut is None else cut
    return go.Scatter(
        x=[min(bar.end, most) for _, bar in rows],
        y=[place for place, _ in rows],
        mode="text",
        text=[
            f"{bytes_text(bar.end)} → " if bar.end > most else f" {bytes_text(bar.end)}" for _, bar in rows
        ],
        textposition=["middle left" if bar.end > most else "middle right" for _, bar in rows],
        hoverinfo="skip",
        showlegend=False,
        cliponaxis=False,
    )


def _note(line: tuple[int, str]) -> dict[str, Any]:
    look = {"xref": "x", "xanchor": "center", "font": {"size": 11, "color": theme.GREY}}
    return theme.note(line[1], x=line[0], y=1) | look
