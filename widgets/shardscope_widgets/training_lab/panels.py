"""The panels below the timeline, each shown only when a run has data for it.

There are panels for the schedule of a pipeline, the staleness in a parameter server, and the distance from consensus in
gossip. Compressed runs have panels for bytes and times compared with an uncompressed run, and for residuals. Layer-wise
optimizers have one for trust ratios, runs that measure gradient noise one for the critical batch size, and every run
one for its memory by kind.

These figures are built in the lab's own thread, where Plotly looks up NumPy and pandas among the loaded modules. It
could find a module that another thread, such as that of a check, has only partly imported, so both are imported here.
"""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets
import numpy as np  # noqa: F401
import pandas as pd  # noqa: F401
import plotly.graph_objects as go

from shardscope_widgets import figures
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import safe


class Panel:
    """A heading, a figure and a sentence; hidden until it has something to show."""

    def __init__(self, heading: str, note: str) -> None:
        self.figure = LiveFigure(go.Figure(), label=heading)
        self.words = widgets.HTML()
        head = widgets.HTML(f'<div class="ss-heading">{safe(heading)} <span>{safe(note)}</span></div>')
        self.box = widgets.VBox([head, self.figure, self.words])
        self.box.layout.display = "none"

    @property
    def is_shown(self) -> bool:
        """Whether the panel is on the page."""
        return bool(self.box.layout.display != "none")

    def show(self, figure: go.Figure, words: str) -> None:
        """Show the panel with this figure and text."""
        self.figure.show(figure)
        self.words.value = f'<div class="ss-words">{safe(words)}</div>'
        self.box.layout.display = None

    def hide(self) -> None:
        """Hide the panel."""
        self.box.layout.display = "none"


class Panels:
    """All panels, in one box."""

    def __init__(self) -> None:
        self.schedule = Panel("Pipeline", "each pass of each micro-batch, as measured")
        self.staleness = Panel("Staleness", "staleness of the gradients that the server applied")
        self.consensus = Panel("Consensus", "distance of the ranks' parameters from their mean")
        self.compression = Panel("Compression", "bytes saved, and the cost of packing")
        self.layers = Panel("Layers", "trust ratios and residuals of the run in focus")
        self.memory = Panel("Memory by kind", "memory held by each rank in the newest measured step")
        self.noise = Panel("Gradient noise", "the batch size up to which larger batches save steps")
        panels = (
            self.schedule, self.staleness, self.consensus, self.compression, self.layers, self.noise, self.memory,
        )  # fmt: skip
        self.box = widgets.VBox([panel.box for panel in panels])

    def draw(self, focus: Trace | None, shown: Sequence[Trace], *, last_step: int | None = None) -> None:
        """Draw all panels that have data.

        Schedule, staleness, gradient noise and layers are drawn for the run in focus; consensus, compression and memory
        for all shown runs.
        """
        self._draw_schedule(focus, last_step)
        self._draw_staleness(focus)
        self._draw_consensus(shown)
        self._draw_compression(shown)
        self._draw_noise(focus)
        self._draw_layers(focus)
        self._draw_memory(focus, shown)

    def _draw_schedule(self, focus: Trace | None, last_step: int | None) -> None:
        info = figures.gantt_info(focus, last_step=last_step) if focus else None
        if info is None or not info.ops:
            self.schedule.hide()
        else:
            self.schedule.show(figures.draw_gantt(info), figures.gantt_text(info))

    def _draw_staleness(self, focus: Trace | None) -> None:
        info = figures.staleness_info(focus) if focus else None
        if info is None or not info.is_telling:
            self.staleness.hide()
        else:
            self.staleness.show(figures.draw_staleness(info), figures.staleness_text(info))

    def _draw_consensus(self, shown: Sequence[Trace]) -> None:
        info = figures.consensus_info(shown)
        if not info.curves:
            self.consensus.hide()
        else:
            self.consensus.show(figures.draw_consensus(info), figures.consensus_text(info))

    def _draw_compression(self, shown: Sequence[Trace]) -> None:
        info = figures.compression_info(shown)
        if not info.is_telling:
            self.compression.hide()
        else:
            self.compression.show(figures.draw_compression(info), figures.compression_text(info))

    def _draw_noise(self, focus: Trace | None) -> None:
        info = figures.noise_scale_info_of(focus) if focus else None
        if info is None:
            self.noise.hide()
        else:
            self.noise.show(figures.draw_noise_scale(info), figures.noise_scale_text(info))

    def _draw_layers(self, focus: Trace | None) -> None:
        info = None if focus is None else figures.layers_info_of(focus)
        if info is None or not info.is_telling:
            self.layers.hide()
        else:
            self.layers.show(figures.draw_layers(info), figures.layers_text(info))

    def _draw_memory(self, focus: Trace | None, shown: Sequence[Trace]) -> None:
        info = figures.memory_kinds_info(shown, alone=alone_beside(focus, shown))
        if not info.runs:
            self.memory.hide()
        else:
            self.memory.show(figures.draw_memory_kinds(info), figures.memory_kinds_text(info))


def alone_beside(focus: Trace | None, shown: Sequence[Trace]) -> Trace | None:
    """Return the single-process run with the same model and data as the run in focus; None if none is shown."""
    same = [trace for trace in shown if focus is not None and trace.workload == focus.workload]
    return next((trace for trace in same if trace.world_size == 1), None)
