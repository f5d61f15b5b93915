"""The panels below the timeline, each shown only when a run has data for it.

- Pipeline: the schedule, pass by pass.
- Staleness: gradients that a parameter server applied.
- Consensus: distance of the ranks' parameters from their mean, for gossip.
- Compression: bytes and times compared with an uncompressed run.
- Layers: trust ratios of layer-wise optimizers, and residuals of compressed runs.
- Experts: the load of each expert, for models with experts.
- Gradient noise: the critical batch size, for runs that measure gradient noise.
- Memory: memory of each rank by type, for every run.

These figures are built in the lab's own thread, where Plotly looks up NumPy and pandas among the loaded modules. Plotly
could find a module that another thread has only partly imported, so this module imports both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import ipywidgets as widgets
import numpy as np  # noqa: F401
import pandas as pd  # noqa: F401
import plotly.graph_objects as go

from shardscope.spec.settings import one_process_baseline
from shardscope_widgets.figures import (
    _compression,
    _consensus,
    _expert_load,
    _layers,
    _memory_kinds,
    _noise_scale,
    _pipeline,
    _staleness,
    theme,
)
from shardscope_widgets.figures._ghosts import Ghost
from shardscope_widgets.kit import markup
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.trace import Trace

Info = TypeVar("Info")


class Panel:
    """A heading, a figure and a sentence; hidden while there is nothing to draw."""

    def __init__(self, heading: str, note: str) -> None:
        self.figure = LiveFigure(theme.blank(), label=heading)
        self.words = widgets.HTML()
        self.box = widgets.VBox([markup.heading(heading, note), self.figure, self.words])
        self.box.layout.display = "none"

    def draw(
        self,
        info: Info | None,
        has_data: object,
        figure_of: Callable[[Info], go.Figure],
        text_of: Callable[[Info], str],
    ) -> None:
        """Show the figure and the text of `info`; hide the panel if it has no data."""
        if info is None or not has_data:
            self.box.layout.display = "none"
            return
        self.figure.show(figure_of(info))
        self.words.value = markup.words_html(text_of(info))
        self.box.layout.display = None


class Panels:
    """All panels, in one box."""

    def __init__(self) -> None:
        self.schedule = Panel("Pipeline", "each pass of each micro-batch, as measured")
        self.staleness = Panel("Staleness", "of the gradients that the server applied")
        self.consensus = Panel("Consensus", "distance of the ranks' parameters from their mean")
        self.compression = Panel("Compression", "bytes saved, and the cost of compression")
        self.layers = Panel("Layers", "trust ratios and compression residuals of the selected run")
        self.experts = Panel("Experts", "tokens that each expert of the selected run gets")
        self.memory = Panel("Memory by type", "at each rank's peak; fainter: types that ZeRO does not shard")
        self.noise = Panel("Gradient noise", "the batch size up to which larger batches save steps")
        panels = (
            self.schedule, self.staleness, self.consensus, self.compression, self.layers, self.experts,
            self.noise, self.memory,
        )  # fmt: skip
        self.box = widgets.VBox([panel.box for panel in panels])

    def draw(
        self,
        focus: Trace | None,
        shown: Sequence[Trace],
        *,
        last_step: int | None = None,
        ghosts: Mapping[str, Ghost] | None = None,
    ) -> None:
        """Draw all panels that have data.

        Schedule, staleness, gradient noise, layers and experts are drawn for the run in focus; consensus, compression
        and memory for all shown runs. `ghosts` are predicted values by run id.
        """
        ghost = (ghosts or {}).get(focus.run_id) if focus else None
        gantt = _pipeline.gantt_info(focus, last_step=last_step, ghost=ghost) if focus else None
        stale = _staleness.staleness_info(focus) if focus else None
        noise = _noise_scale.noise_scale_info_of(focus) if focus else None
        layers = _layers.layers_info_of(focus) if focus else None
        experts = _expert_load.expert_load_info(focus) if focus else None
        apart, packed = _consensus.consensus_info(shown), _compression.compression_info(shown, ghosts=ghosts)
        memory = _memory_kinds.memory_kinds_info(shown, alone=alone_beside(focus, shown), ghosts=ghosts)
        self.schedule.draw(gantt, gantt and gantt.ops, _pipeline.draw_gantt, _pipeline.gantt_text)
        self.staleness.draw(
            stale, stale and stale.is_telling, _staleness.draw_staleness, _staleness.staleness_text
        )
        self.consensus.draw(apart, apart.curves, _consensus.draw_consensus, _consensus.consensus_text)
        self.compression.draw(
            packed, packed.is_telling, _compression.draw_compression, _compression.compression_text
        )
        self.noise.draw(noise, noise, _noise_scale.draw_noise_scale, _noise_scale.noise_scale_text)
        self.layers.draw(layers, layers and layers.is_telling, _layers.draw_layers, _layers.layers_text)
        self.experts.draw(experts, experts, _expert_load.draw_expert_load, _expert_load.expert_load_text)
        self.memory.draw(
            memory, memory.runs, _memory_kinds.draw_memory_kinds, _memory_kinds.memory_kinds_text
        )


def alone_beside(focus: Trace | None, shown: Sequence[Trace]) -> Trace | None:
    """Return the shown single-process run with the same workload as the run in focus; None if there is none."""
    known = [trace for trace in shown if trace.job is not None]
    if focus is None or focus.job is None:
        return None
    index = one_process_baseline(focus.job, [trace.job for trace in known if trace.job is not None])
    return None if index is None else known[index]
