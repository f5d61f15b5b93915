"""Training in one process without communication, the reference strategy."""

from __future__ import annotations

from torch import nn

from shardscope.training.strategies.base import RankStrategy


class SingleRank(RankStrategy):
    """Strategy that trains in one process."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model
