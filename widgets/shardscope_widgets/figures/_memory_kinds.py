"""Memory of each rank by type: one stacked bar per rank, with runs one below the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.schema import MEMORY_KINDS
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._ghosts import Ghost, memory_gap, memory_ghosts
from shardscope_widgets.figures._stacks import RunBars, StackBar, draw_stacks
from shardscope_widgets.trace import Trace, named_apart
from shardscope_widgets.words import bytes_text, listed

KIND_NAMES = {"optimizer": "optimizer state"}


class MemoryKindsInfo(NamedTuple):
    """Memory of each rank of several runs in bytes, by type of memory in the order of `MEMORY_KINDS`.

    `alone` is the memory of a single process for the same job, in bytes; None if unknown. `peaks` has the peak memory
    per rank of each run, which is that of all types together.
    """

    runs: tuple[RunBars, ...]
    alone: int | None
    peaks: tuple[int, ...] = ()


def memory_kinds_info(
    traces: Sequence[Trace], *, alone: Trace | None = None, ghosts: Mapping[str, Ghost] | None = None
) -> MemoryKindsInfo:
    """Return the data of the runs that report memory by type.

    Args:
        traces: The runs.
        alone: The single-process baseline run; None if there is none.
        ghosts: Predicted values by run id, which are drawn below the measured values.
    """
    known = ghosts or {}
    shown = [trace for trace in named_apart(traces) if trace.held]
    return MemoryKindsInfo(
        tuple(
            _run(trace)._replace(predicted=memory_ghosts(trace, known.get(trace.run_id))) for trace in shown
        ),
        _run(alone).most if alone is not None and alone.held else None,
        tuple(trace.held_bytes or 0 for trace in shown),
    )


def _run(trace: Trace) -> RunBars:
    ranks = sorted(trace.held.items())
    return RunBars(
        trace.label,
        tuple(
            StackBar(trace.name_of(rank), tuple(held[kind] for kind in MEMORY_KINDS)) for rank, held in ranks
        ),
    )


def memory_kinds_text(info: MemoryKindsInfo) -> str:
    """Describe the bars in words, one line per run."""
    if not info.runs:
        return "No run has reported its memory by type yet."
    return "\n".join(map(_sentence, info.runs, info.peaks))


def _sentence(run: RunBars, peak: int) -> str:
    bar = max(run.bars, key=lambda bar: bar.total)
    parts = sorted(zip(bar.sizes, MEMORY_KINDS, strict=True), reverse=True)
    shares = [f"{size / bar.total:.0%} {_name(kind)}" for size, kind in parts if size >= 0.01 * bar.total > 0]
    gap = memory_gap(run.bars, run.predicted, list(map(_name, MEMORY_KINDS)))
    gap = gap.removeprefix("Dashed and fainter: predicted. ")  # the legend says so
    told = (
        f"{run.label}: peak memory per rank {bytes_text(peak)}; each type at its own peak: {listed(shares)}."
    )
    return f"{told} {gap}".strip()


def _name(kind: str) -> str:
    return KIND_NAMES.get(kind, kind)


def draw_memory_kinds(info: MemoryKindsInfo) -> go.Figure:
    """Draw a stacked bar per rank, with a dashed line at the memory of a single process if that is known."""
    line = None if info.alone is None else (info.alone, f"one process: {bytes_text(info.alone)}")
    return draw_stacks(
        info.runs, [(_name(kind), theme.MEMORY_LOOKS[kind]) for kind in MEMORY_KINDS], line=line
    )


def memory_kinds(traces: Sequence[Trace], *, alone: Trace | None = None) -> go.Figure:
    """Draw each rank's memory by type, with a dashed line at the memory of a single process.

    Args:
        traces: Runs to draw.
        alone: Single-process run of the same job; None draws no line.
    """
    return draw_memory_kinds(memory_kinds_info(traces, alone=alone))
