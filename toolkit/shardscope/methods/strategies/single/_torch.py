"""Training in one process without communication, as a reference for all other strategies."""

from __future__ import annotations

from torch import nn

from shardscope.training.strategies.base import RankStrategy


class SingleRank(RankStrategy):
    """Strategy that trains in one process."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model
