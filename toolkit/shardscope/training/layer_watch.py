"""Events every few steps about the effect of a step on the layers: trust ratios and compression residuals.

    watch = LayerWatch(strategy, events)
    watch.begin(optimizer, is_due=...)     before the step: switches on the records that are made only on demand
    watch.tell(step, optimizer, ...)       after it

One rank reports layers that are the same on all ranks; each rank reports its own residuals. The watch only reads: it
exchanges nothing and does not change training.
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
    """Records the layers of one rank."""

    strategy: RankStrategy
    events: EventWriter

    def begin(self, optimizer: torch.optim.Optimizer, *, is_due: bool) -> None:
        """Start a step; `is_due` states whether its layers are recorded."""
        if isinstance(optimizer, LayerwiseOptimizer):
            optimizer.is_watched = is_due
        if self.strategy.compressor is not None:
            self.strategy.compressor.watch(is_due)

    def tell(self, step: int, optimizer: torch.optim.Optimizer, *, lr: float, skipped: bool) -> None:
        """Write the event unless it is empty; a skipped step has moved no layer."""
        layers = [] if skipped else self.strategy.layer_signals(optimizer)
        compressor = self.strategy.compressor
        owed = [] if compressor is None else [list(row) for row in compressor.owed]
        if layers or owed:
            self.events.emit("layers", step=step, lr=lr, **_columns(layers), owed=owed)


def _columns(layers: list[LayerSignal]) -> dict[str, list[Any]]:
    return {field: [getattr(layer, field) for layer in layers] for field in LayerSignal._fields}
