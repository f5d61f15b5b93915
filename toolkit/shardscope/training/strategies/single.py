"""One process, no communication: the oracle."""

from __future__ import annotations

from torch import nn

from shardscope.training.strategies.base import Strategy


class Single(Strategy):
    """Trains on one process as one would by hand."""

    name = "single"

    def wrap(self, model: nn.Module) -> nn.Module:
        return model
