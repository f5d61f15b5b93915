"""Memory of each rank by kind: one stacked bar per rank, with runs one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.schema import MEMORY_KINDS
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._stacks import Group, StackBar, draw_stacks
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import bytes_text, listed

KIND_NAMES = {"optimizer": "optimizer state", "gathered": "gathered from other ranks"}


class MemoryKindsInfo(NamedTuple):
    """Memory of each rank of several runs in bytes, by kind in the order of `MEMORY_KINDS`.

    `alone` is the memory of a single process for the same job, in bytes; None if unknown.
    """

    runs: tuple[Group, ...]
    alone: int | None


def memory_kinds_info(traces: Sequence[Trace], *, alone: Trace | None = None) -> MemoryKindsInfo:
    """Return the data of the runs that report memory by kind; `alone` is the single-process baseline run."""
    return MemoryKindsInfo(
        tuple(_run(trace) for trace in traces if trace.held),
        _run(alone).most if alone is not None and alone.held else None,
    )


def _run(trace: Trace) -> Group:
    ranks = sorted(trace.held.items())
    return Group(
        trace.label,
        tuple(
            StackBar(trace.name_of(rank), tuple(held[kind] for kind in MEMORY_KINDS)) for rank, held in ranks
        ),
    )


def memory_kinds_text(info: MemoryKindsInfo) -> str:
    """Describe the bars in words, one sentence per run."""
    if not info.runs:
        return "No run has reported its memory by kind yet."
    return " ".join(map(_sentence, info.runs))


def _sentence(run: Group) -> str:
    bar = max(run.bars, key=lambda bar: bar.total)
    parts = sorted(zip(bar.sizes, MEMORY_KINDS, strict=True), reverse=True)
    shares = [f"{size / bar.total:.0%} {_name(kind)}" for size, kind in parts if size >= 0.01 * bar.total > 0]
    return f"{run.label}: a rank holds up to {bytes_text(bar.total)}: {listed(shares)}."


def _name(kind: str) -> str:
    return KIND_NAMES.get(kind, kind)


def draw_memory_kinds(info: MemoryKindsInfo) -> go.Figure:
    """Draw the figure for `info`."""
    line = None if info.alone is None else (info.alone, f"one process: {bytes_text(info.alone)}")
    return draw_stacks(
        info.runs, [(_name(kind), theme.MEMORY_LOOKS[kind]) for kind in MEMORY_KINDS], line=line
    )


def memory_kinds(traces: Sequence[Trace], *, alone: Trace | None = None) -> go.Figure:
    """Draw each rank's memory by kind, with a dashed line at the memory of a single process.

    Args:
        traces: Runs to draw.
        alone: Single-process run of the same job; None draws no line.
    """
    return draw_memory_kinds(memory_kinds_info(traces, alone=alone))
