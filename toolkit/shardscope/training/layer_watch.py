"""At every few steps, one event on what the step did to the layers: trust ratios, and what compression owes.

    watch = LayerWatch(strategy, events)
    watch.begin(optimizer, is_due=...)     before the step: have noted what is noted only on demand
    watch.tell(step, optimizer, ...)       after it

Of layers that all ranks hold alike one rank tells; what is owed each rank tells of its own. All of it is read, nothing
is exchanged for it, and no number of the training changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardscope.training.events import EventWriter
from shardscope.training.optim import LayerSignal, LayerwiseOptimizer
from shardscope.training.strategies.base import RankStrategy


@dataclass
class LayerWatch:
    """One rank's watch."""

    strategy: RankStrategy
    events: EventWriter

    def begin(self, optimizer: torch.optim.Optimizer, *, is_due: bool) -> None:
        """Begin a step; `is_due` says whether its layers are looked at."""
        if isinstance(optimizer, LayerwiseOptimizer):
            optimizer.is_watched = is_due
        if self.strategy.compressor is not None:
            self.strategy.compressor.watch(is_due)

    def tell(self, step: int, optimizer: torch.optim.Optimizer, *, lr: float, skipped: bool) -> None:
        """Write the event, if there is anything in it; a step that was skipped has moved no layer."""
        layers = [] if skipped else self.strategy.layer_signals(optimizer)
        compressor = self.strategy.compressor
        owed = [] if compressor is None else [list(row) for row in compressor.owed]
        if layers or owed:
            self.events.emit("layers", step=step, lr=lr, **_columns(layers), owed=owed)


def _columns(layers: list[LayerSignal]) -> dict[str, list[Any]]:
    return {field: [getattr(layer, field) for layer in layers] for field in LayerSignal._fields}
