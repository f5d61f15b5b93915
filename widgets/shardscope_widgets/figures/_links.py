"""Bytes sent and received over each rank's link in one step, one bar per rank.

If one rank's bar is much longer than all other bars, that rank's link is the bottleneck.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures._stacks import Layer, RunBars, StackBar, draw_stacks
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import bytes_text, plural

LAYERS = (Layer("sent", theme.RunStyle("#e06c2c")), Layer("received", theme.RunStyle("#5aa9e6", pattern="/")))


class LinksInfo(NamedTuple):
    """Bytes sent and received by each rank in its newest step, for several runs."""

    runs: tuple[RunBars, ...]


def links_info(traces: Sequence[Trace]) -> LinksInfo:
    """Return the data of the runs with more than one rank."""
    return LinksInfo(tuple(_run(trace) for trace in traces if trace.world_size > 1 and trace.links))


def _run(trace: Trace) -> RunBars:
    return RunBars(
        trace.label,
        tuple(
            StackBar(trace.name_of(rank), (moved.sent_bytes, moved.received_bytes))
            for rank, moved in sorted(trace.links.items())
        ),
    )


def links_text(info: LinksInfo) -> str:
    """Describe the bars in words, one sentence per run."""
    if not info.runs:
        return "No run on several ranks has finished a step yet."
    return " ".join(map(_sentence, info.runs))


def _sentence(run: RunBars) -> str:
    busiest = max(run.bars, key=lambda bar: bar.total)
    mean = sum(bar.total for bar in run.bars) / len(run.bars)
    times = f", {busiest.total / mean:.1f} times the mean of {plural(len(run.bars), 'rank')}" if mean else ""
    return (
        f"{run.label}: the busiest link ({busiest.name}) carries {bytes_text(busiest.total)} per step{times}."
    )


def links(traces: Sequence[Trace]) -> go.Figure:
    """Draw the bytes sent and received over each rank's link in its newest step."""
    info = links_info(traces)
    return draw_stacks(info.runs, LAYERS)
