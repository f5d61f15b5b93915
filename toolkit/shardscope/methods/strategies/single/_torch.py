"""One process, no communication: the oracle."""

from __future__ import annotations

from torch import nn

from shardscope.training.strategies.base import RankStrategy


class Single(RankStrategy):
    """Trains on one process as one would by hand."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model
