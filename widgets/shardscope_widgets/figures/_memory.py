"""Peak memory of the process of every rank, one group of bars per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.figures import FIGURES
from shardscope_widgets.figures import theme
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.trace import Trace, named_apart


class MemoryBars(NamedTuple):
    """Peak memory of the processes of one run, in bytes, by rank."""

    label: str
    look: RunStyle
    ranks: tuple[int, ...]
    process_bytes: tuple[int, ...]


class MemoryInfo(NamedTuple):
    """Peak memory of several runs, with one set of bars per run."""

    runs: tuple[MemoryBars, ...]


def memory_info(traces: Sequence[Trace]) -> MemoryInfo:
    """Return the peak memory of each rank's process so far, for each run."""
    looks = theme.run_looks(traces)
    return MemoryInfo(tuple(map(_bars, named_apart(traces), looks)))


def _bars(trace: Trace, look: RunStyle) -> MemoryBars:
    ranks = tuple(sorted(trace.peak_memory))
    return MemoryBars(trace.label, look, ranks, tuple(trace.peak_memory[rank] for rank in ranks))


def memory_bars(bars: MemoryBars) -> dict[str, Any]:
    """Return the trace properties of one run's bars."""
    return {
        "x": [f"rank {rank}" for rank in bars.ranks],
        "y": bars.process_bytes,
        "name": bars.label,
        "marker": theme.striped(bars.look, white=0.65, size=6, solidity=0.25) | {"line": {"width": 0}},
        "hovertemplate": "%{fullData.name}<br>%{x}: %{y:.3s}B<extra></extra>",
        "legendgroup": bars.label,
    }


def draw(info: MemoryInfo, *, height: int = 320) -> go.Figure:
    """Draw the peak memory of each rank's process, with one set of bars per run."""
    figure = go.Figure([go.Bar(memory_bars(bars)) for bars in info.runs])
    figure.update_layout(
        xaxis=theme.axis(showgrid=False),
        yaxis=memory_axis() | {"title": {"text": FIGURES["process_bytes"].title}},
    )
    return theme.style(figure, height=height, showlegend=True)


def memory_axis() -> dict[str, Any]:
    """Return settings of the value axis for memory bars."""
    return theme.axis(tickformat="~s", ticksuffix="B", rangemode="tozero", nticks=5)


def memory(traces: Sequence[Trace]) -> go.Figure:
    """Draw the peak memory of each rank's process, for several runs."""
    return draw(memory_info(traces))
