"""Events every few steps with per-layer trust ratios and compression residuals.

    watch = LayerWatch(strategy, events)
    watch.begin(optimizer, is_due=...)     before the step: switches recording on or off
    watch.tell(step, optimizer, ...)       after the step: writes the event

Layers that are identical on all ranks are reported by one rank; every rank reports its own residuals. The watch is
read-only: it sends nothing and does not affect training.
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
    """Writes one rank's per-layer events."""

    strategy: RankStrategy
    events: EventWriter

    def begin(self, optimizer: torch.optim.Optimizer, *, is_due: bool) -> None:
        """Prepare for a step; `is_due` says whether to record its layers."""
        if isinstance(optimizer, LayerwiseOptimizer):
            optimizer.is_watched = is_due
        if self.strategy.compressor is not None:
            self.strategy.compressor.watch(is_due)

    def tell(self, step: int, optimizer: torch.optim.Optimizer, *, lr: float, skipped: bool) -> None:
        """Write the event for this step unless it is empty; a skipped step has no layer updates, only residuals."""
        layers = [] if skipped else self.strategy.layer_signals(optimizer)
        compressor = self.strategy.compressor
        residuals = [] if compressor is None else [list(row) for row in compressor.residuals]
        if layers or residuals:
            self.events.emit("layers", step=step, lr=lr, **_columns(layers), owed=residuals)


def _columns(layers: list[LayerSignal]) -> dict[str, list[Any]]:
    return {field: [getattr(layer, field) for layer in layers] for field in LayerSignal._fields}
