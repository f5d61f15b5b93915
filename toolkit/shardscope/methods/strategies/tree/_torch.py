"""Data parallelism over Shardscope's own binary tree."""

from __future__ import annotations

from torch import Tensor

from shardscope.methods.strategies import tree
from shardscope.training.collectives.tree import TreeAllReduce as TreeCollective
from shardscope.training.strategies.own_all_reduce import OwnAllReduce


class TreeRank(OwnAllReduce):
    """Strategy that all-reduces each gradient bucket over the tree as soon as the backward pass has filled it."""

    settings: tree.Tree

    def prepare(self) -> None:
        settings, group = self.settings, self.context.group
        assert group is not None
        self.collective = TreeCollective(group, int(settings.slice_mb * 2**20))

    def reduce_(self, buffer: Tensor) -> Tensor:
        return self.collective.all_reduce_(buffer)

    def work_space(self) -> list[Tensor]:
        return self.collective.work_space
