"""Memory of each rank by type: stacked bars of runs or of predictions, one below the other.

The states, which ZeRO shards (parameters, gradients and optimizer state), are drawn in full colour, the rest faint. A
bar ends at the rank's peak. Ranks that hold the same are drawn as one bar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.spec.run_names import run_names
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._ghosts import Ghost, bars_of, ghost_of, memory_gap, memory_ghosts
from shardscope_widgets.figures._stacks import STATES, Layer, RunBars, StackBar, draw_stacks
from shardscope_widgets.trace import Trace, named_apart
from shardscope_widgets.words import bytes_text, listed, safe

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction

KIND_NAMES = {"optimizer": "optimizer state"}
_SHARES = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth"}
_NEAR = 0.02
"""Relative difference up to which a share counts as a simple fraction, and two ranks as holding the same."""
_ROW_PX = 36
"""Height of the bar of a run whose label is next to it."""
_ROOM = 2
"""Multiple of the largest states at which bars are cut if all of them are longer, so that the states remain visible."""
_CHOSEN = "rgba(42,134,209,0.14)"


class MemoryKindsInfo(NamedTuple):
    """Memory of each rank of several runs in bytes, by type of memory in the order of `MEMORY_KINDS`.

    `alone` is the memory of a single process for the same job, in bytes; None if unknown.
    """

    runs: tuple[RunBars, ...]
    alone: int | None


def memory_kinds_info(
    traces: Sequence[Trace | JobPrediction],
    *,
    alone: Trace | None = None,
    ghosts: Mapping[str, Ghost] | None = None,
) -> MemoryKindsInfo:
    """Return the data of the runs that report memory by type, and of predictions, which are labelled with the job's
    name, or with its strategy if it has none.

    Args:
        traces: Runs, or predictions of jobs.
        alone: The single-process baseline run; None if there is none.
        ghosts: Predicted values by run id, which are drawn below the measured values.
    """
    known = ghosts or {}
    measured = [
        _run(trace)._replace(predicted=memory_ghosts(trace, known.get(trace.run_id)))
        for trace in named_apart([each for each in traces if isinstance(each, Trace)])
        if trace.held
    ]
    before = [each for each in traces if not isinstance(each, Trace)]
    labels = [each.job.name or each.job.strategy.label for each in before]
    if len({*labels}) < len(labels):
        labels = run_names([each.job for each in before])
    predicted = list(map(_predicted, before, labels))
    return MemoryKindsInfo(
        tuple(run for run in (*measured, *predicted) if run.bars),
        max(alone.peaks.values()) if alone is not None and alone.held else None,
    )


def _run(trace: Trace) -> RunBars:
    bars = (
        StackBar(trace.name_of(rank), tuple(held[kind] for kind in MEMORY_KINDS), trace.peaks[rank])
        for rank, held in sorted(trace.held.items())
    )
    return RunBars(trace.label, tuple(bars))


def _predicted(prediction: JobPrediction, label: str) -> RunBars:
    ranks = [f"rank {rank}" for rank in range(prediction.job.world_size)]
    return RunBars(label, bars_of(ghost_of(prediction), ranks))


def memory_kinds_text(info: MemoryKindsInfo) -> str:
    """Return sentences that compare the runs' model states and peaks; for a single run, also its memory by type."""
    if not info.runs:
        return "No run has reported its memory by type yet."
    lines = [states_text(info), *(_sentence(run, is_alone=len(info.runs) == 1) for run in info.runs)]
    return "\n".join(line for line in lines if line)


def states_text(info: MemoryKindsInfo) -> str:
    """Return how the smallest states on a rank compare with the largest; empty if all runs hold about the same."""
    states = [(max(map(_states, run.bars)), run.label) for run in info.runs]
    (least, saver), (most, spender) = min(reversed(states), key=itemgetter(0)), max(states, key=itemgetter(0))
    if not least or least > (1 - _NEAR) * most:
        return ""
    are_even = all(
        min(map(_states, run.bars)) >= (1 - _NEAR) * max(map(_states, run.bars)) for run in info.runs
    )
    times = most / least
    share = _SHARES.get(round(times)) if abs(times / round(times) - 1) <= _NEAR else None
    return (
        f"{saver} holds {share or f'{1 / times:.0%}'} of the model states of {spender}: {bytes_text(least)} instead of "
        f"{bytes_text(most)} on {'each rank' if are_even else 'the rank that holds the most'}."
    )


def _states(bar: StackBar) -> int:
    return sum(bar.sizes[: len(STATES)])


def _sentence(run: RunBars, *, is_alone: bool) -> str:
    bar = max(run.bars, key=lambda bar: bar.total)
    parts = sorted(zip(bar.sizes, MEMORY_KINDS, strict=True), reverse=True)
    own = [f"{bytes_text(size)} {_name(kind)}" for size, kind in parts if size >= 0.01 * bar.total > 0]
    gap = memory_gap(run.bars, run.predicted, list(map(_name, MEMORY_KINDS)))
    gap = gap.removeprefix("Dashed and fainter: predicted. ")  # the legend says so
    when = ", each at its own peak" if bar.total > bar.end else ""
    kinds = f"; by type{when}: {listed(own)}" if is_alone and own else ""
    return f"{run.label}: peak memory per rank {bytes_text(run.most)}{kinds}. {gap}".strip()


def _name(kind: str) -> str:
    return KIND_NAMES.get(kind, kind)


def draw_memory_kinds(info: MemoryKindsInfo, *, chosen: str = "") -> go.Figure:
    """Draw a stacked bar for each rank, or for all ranks of a run that hold the same.

    Args:
        info: The data; with `alone`, a dashed line marks the memory of a single process.
        chosen: Label of a run to highlight.
    """
    line = None if info.alone is None else (info.alone, f"one process: {bytes_text(info.alone)}")
    runs = list(map(_as_one_bar, info.runs))
    if len(runs) < 2 or any(len(run.bars) > 1 for run in runs):
        return draw_stacks(runs, LAYERS, line=line)
    rows = [_row(run, is_chosen=run.label == chosen) for run in runs]
    room = round(_ROOM * max(_states(run.bars[0]) for run in runs))
    is_cut = line is None and room > 0 and min(run.most for run in runs) > room
    figure = draw_stacks(rows, LAYERS, line=line, row_px=_ROW_PX, cut=room if is_cut else None)
    for place, run in enumerate(runs):
        if run.label == chosen:
            figure.add_hrect(place - 0.5, place + 0.5, fillcolor=_CHOSEN, line_width=0, layer="below")
    return figure


LAYERS = [Layer(_name(kind), theme.MEMORY_LOOKS[kind], is_faint=kind not in STATES) for kind in MEMORY_KINDS]
"""The types of memory as layers of a stack."""


def _as_one_bar(run: RunBars) -> RunBars:
    """Return a run with the bar of its fullest rank alone, if all ranks hold about the same."""
    bars, room = run.bars, _NEAR * max(bar.total for bar in run.bars)
    if len(bars) < 2 or any(
        max(sizes) - min(sizes) > room for sizes in zip(*(bar.sizes for bar in bars), strict=True)
    ):
        return run
    fullest = max(range(len(bars)), key=lambda rank: bars[rank].end)
    name = f"each of {len(bars)} ranks"
    return run._replace(
        bars=(bars[fullest]._replace(name=name),), predicted=run.predicted[fullest : fullest + 1]
    )


def _row(run: RunBars, *, is_chosen: bool) -> RunBars:
    """Return a run with a single bar, with the run's label and the size of its states next to it."""
    label = f"<b>{safe(run.label)}</b>" if is_chosen else safe(run.label)
    states = f"<span style='font-size:11px'>states {bytes_text(_states(run.bars[0]))}</span>"
    return run._replace(label="", bars=(run.bars[0]._replace(name=f"{label} <br>{states}"),))


def memory_kinds(traces: Sequence[Trace | JobPrediction], *, alone: Trace | None = None) -> go.Figure:
    """Draw each rank's memory by type, the states that ZeRO shards first, up to the rank's peak.

    Args:
        traces: Runs, or predictions of jobs before they run.
        alone: Single-process run of the same job, whose memory a dashed line marks; None draws no line.

    Example:
        >>> memory_kinds([ss.predict(job.replace(strategy=name)) for name in ("ring", "zero-3")])  # doctest: +SKIP
    """
    return draw_memory_kinds(memory_kinds_info(traces, alone=alone))
