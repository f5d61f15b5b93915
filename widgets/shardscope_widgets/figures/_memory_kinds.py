"""What each rank's memory is made of: one stacked bar a rank, runs below each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.trace import MEMORY_KINDS, Trace
from shardscope_widgets.words import bytes_text, listed, safe

KIND_NAMES = {"optimizer": "optimizer state", "gathered": "gathered from other ranks"}
ROW_PX = 24
_HEAD_PX = 74


class HeldBar(NamedTuple):
    """One rank: its name, and bytes in the order of `MEMORY_KINDS`."""

    name: str
    held: tuple[int, ...]

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(self.held)


class HeldRun(NamedTuple):
    """One run's ranks."""

    label: str
    ranks: tuple[HeldBar, ...]

    @property
    def most(self) -> int:
        """Bytes of the rank that holds most."""
        return max((bar.total for bar in self.ranks), default=0)


class MemoryKindsInfo(NamedTuple):
    """Several runs, and what one process alone holds for the same job, if that is known."""

    runs: tuple[HeldRun, ...]
    alone: int | None


def memory_kinds_info(traces: Sequence[Trace], *, alone: Trace | None = None) -> MemoryKindsInfo:
    """What the runs that tell their memory by kind held in their newest step; `alone` is a run on one process."""
    return MemoryKindsInfo(
        tuple(_run(trace) for trace in traces if trace.held),
        _run(alone).most if alone is not None and alone.held else None,
    )


def _run(trace: Trace) -> HeldRun:
    ranks = sorted(trace.held.items())
    return HeldRun(
        trace.label,
        tuple(
            HeldBar(trace.name_of(rank), tuple(held[kind] for kind in MEMORY_KINDS)) for rank, held in ranks
        ),
    )


def memory_kinds_text(info: MemoryKindsInfo) -> str:
    """The bars in words, a sentence a run."""
    if not info.runs:
        return "No run has told its memory by kind yet."
    return " ".join(map(_sentence, info.runs))


def _sentence(run: HeldRun) -> str:
    bar = max(run.ranks, key=lambda bar: bar.total)
    parts = sorted(zip(bar.held, MEMORY_KINDS, strict=True), reverse=True)
    shares = [
        f"{size / bar.total:.0%} {_name(kind)}"
        for size, kind in parts
        if bar.total and size / bar.total >= 0.01
    ]
    return f"{run.label}: a rank holds up to {bytes_text(bar.total)}, of it {listed(shares)}."


def _name(kind: str) -> str:
    return KIND_NAMES.get(kind, kind)


def draw(info: MemoryKindsInfo) -> go.Figure:
    """Horizontal bars stacked by kind; a heading above each run where there are several."""
    headed = len(info.runs) > 1
    rows, headings = _rows(info, headed)
    figure = go.Figure([_kind(index, kind, rows) for index, kind in enumerate(MEMORY_KINDS)])
    places, bars = [y for y, _ in rows], [bar for _, bar in rows]
    figure.add_trace(
        go.Scatter(
            x=[bar.total for bar in bars], y=places, mode="text", text=[f" {bytes_text(bar.total)}" for bar in bars],
            textposition="middle right", hoverinfo="skip", showlegend=False, cliponaxis=False,
        )
    )  # fmt: skip
    most = max([info.alone or 0, *(bar.total for bar in bars)], default=0)
    lowest = max(places, default=0) + 0.6
    figure.update_layout(
        xaxis=theme.axis(tickformat="~s", ticksuffix="B", range=[0, 1.14 * most or 1], nticks=7),
        yaxis=theme.axis(
            tickvals=places,
            ticktext=[f"{bar.name} " for bar in bars],
            range=[lowest, -0.6],
            showgrid=False,
            fixedrange=True,
        ),
        annotations=headings + _alone_note(info),
        shapes=_alone_line(info),
    )
    return theme.style(
        figure, height=round(_HEAD_PX + 42 + ROW_PX * (lowest + 0.6)), barmode="stack", bargap=0.25,
        margin={"l": 8, "r": 12, "t": _HEAD_PX, "b": 8},
        legend=theme.LEGEND_ABOVE,
    )  # fmt: skip


def _rows(info: MemoryKindsInfo, headed: bool) -> tuple[list[tuple[float, HeldBar]], list[dict[str, Any]]]:
    rows: list[tuple[float, HeldBar]] = []
    headings, place = [], 0.0
    for run in info.runs:
        if headed:
            headings.append(
                theme.note(f"<b>{safe(run.label)}</b>", x=0, y=place) | {"yref": "y", "yanchor": "middle"}
            )
            place += 0.95
        rows += [(place + number, bar) for number, bar in enumerate(run.ranks)]
        place += len(run.ranks) + 0.25 * headed
    return rows, headings


def _kind(index: int, kind: str, rows: Sequence[tuple[float, HeldBar]]) -> go.Bar:
    look = theme.MEMORY_LOOKS[kind]
    return go.Bar(
        x=[bar.held[index] for _, bar in rows],
        y=[place for place, _ in rows],
        width=0.74,
        orientation="h",
        name=_name(kind),
        marker={
            "color": look.colour,
            "line": {"width": 0},
            "pattern": {
                "shape": look.pattern,
                "fgcolor": "rgba(255,255,255,0.6)",
                "size": 5,
                "solidity": 0.22,
            },
        },
        customdata=[[bar.name, bytes_text(bar.held[index])] for _, bar in rows],
        hovertemplate=f"<b>{_name(kind)}</b>, %{{customdata[1]}}<br>%{{customdata[0]}}<extra></extra>",
    )


def _alone_line(info: MemoryKindsInfo) -> list[dict[str, Any]]:
    if info.alone is None:
        return []
    line = {"color": theme.GREY, "width": 1.6, "dash": "dash"}
    return [
        {"type": "line", "x0": info.alone, "x1": info.alone, "y0": 0, "y1": 1, "yref": "paper", "line": line}
    ]


def _alone_note(info: MemoryKindsInfo) -> list[dict[str, Any]]:
    if info.alone is None:
        return []
    text = f"one process: {bytes_text(info.alone)}"
    return [
        theme.note(text, x=info.alone, y=1)
        | {"xref": "x", "xanchor": "center", "font": {"size": 11, "color": theme.GREY}}
    ]


def memory_kinds(traces: Sequence[Trace], *, alone: Trace | None = None) -> go.Figure:
    """What each rank's memory is made of, with a dashed line at what one process holds."""
    return draw(memory_kinds_info(traces, alone=alone))
