"""Peak memory of every rank, one group of bars per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.trace import Trace


class MemoryBars(NamedTuple):
    """Peak memory of one run, in bytes, by rank."""

    label: str
    strategy: str
    ranks: tuple[int, ...]
    peak_bytes: tuple[int, ...]


class MemoryInfo(NamedTuple):
    """One set of bars per run."""

    runs: tuple[MemoryBars, ...]


def memory_info(traces: Sequence[Trace]) -> MemoryInfo:
    """Return the peak memory of each rank of each run so far."""
    return MemoryInfo(tuple(_bars(trace) for trace in traces))


def _bars(trace: Trace) -> MemoryBars:
    ranks = tuple(sorted(trace.peak_memory))
    return MemoryBars(trace.label, trace.strategy, ranks, tuple(trace.peak_memory[rank] for rank in ranks))


def memory_bars(bars: MemoryBars, look: RunStyle) -> dict[str, Any]:
    """Return the trace properties of one run's bars."""
    return {
        "x": [f"rank {rank}" for rank in bars.ranks],
        "y": bars.peak_bytes,
        "name": bars.label,
        "marker": {
            "color": look.colour,
            "line": {"width": 0},
            "pattern": {
                "shape": look.pattern,
                "fgcolor": "rgba(255,255,255,0.65)",
                "size": 6,
                "solidity": 0.25,
            },
        },
        "hovertemplate": "%{fullData.name}<br>%{x}: %{y:.3s}B<extra></extra>",
        "legendgroup": bars.label,
    }


def draw(info: MemoryInfo, *, height: int = 320) -> go.Figure:
    """Draw the figure for `info`."""
    looks = theme.run_looks([bars.strategy for bars in info.runs])
    figure = go.Figure([go.Bar(memory_bars(bars, look)) for bars, look in zip(info.runs, looks, strict=True)])
    figure.update_layout(
        xaxis=theme.axis(showgrid=False), yaxis=memory_axis() | {"title": {"text": "Peak memory"}}
    )
    return theme.style(figure, height=height, showlegend=True)


def memory_axis() -> dict[str, Any]:
    """Return settings of the value axis for memory bars."""
    return theme.axis(tickformat="~s", ticksuffix="B", rangemode="tozero", nticks=5)


def memory(traces: Sequence[Trace]) -> go.Figure:
    """Draw the peak memory of each rank, for several runs."""
    return draw(memory_info(traces))
