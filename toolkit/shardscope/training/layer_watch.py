"""Writes events with the trust ratio and the compression residual of each layer, on some steps.

    watch = LayerWatch(strategy, events)
    watch.begin(optimizer, is_due=...)     before the step: turns recording on or off
    watch.write(step, optimizer, ...)      after the step: writes the event

If all ranks have the same layers, only one rank reports their trust ratios. Every rank reports its own residuals.
Nothing is sent between ranks, and training is not affected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardscope.runlog.writer import EventWriter
from shardscope.training.optim import LayerSignal, LayerwiseOptimizer
from shardscope.training.strategies.base import RankStrategy


@dataclass
class LayerWatch:
    """Writes one rank's events with trust ratios and residuals per layer."""

    strategy: RankStrategy
    events: EventWriter

    def begin(self, optimizer: torch.optim.Optimizer, *, is_due: bool) -> None:
        """Start a step, in which norms and trust ratios per layer are recorded only if `is_due` is true."""
        if isinstance(optimizer, LayerwiseOptimizer):
            optimizer.is_watched = is_due
        if self.strategy.compressor is not None:
            self.strategy.compressor.watch(is_due)

    def write(self, step: int, optimizer: torch.optim.Optimizer, *, lr: float, skipped: bool) -> None:
        """Write the event for this step unless it is empty; a `skipped` step has only residuals, no trust ratios."""
        layers = [] if skipped else self.strategy.layer_signals(optimizer)
        compressor = self.strategy.compressor
        residuals = [] if compressor is None else [list(row) for row in compressor.residuals]
        if layers or residuals:
            self.events.emit("layers", step=step, lr=lr, **_columns(layers), owed=residuals)


def _columns(layers: list[LayerSignal]) -> dict[str, list[Any]]:
    return {field: [getattr(layer, field) for layer in layers] for field in LayerSignal._fields}
