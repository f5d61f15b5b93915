"""Data parallel over our own binary tree."""

from __future__ import annotations

from torch import Tensor

from shardscope.spec import strategy as spec
from shardscope.training.collectives.tree import Tree as TreeCollective
from shardscope.training.strategies._bucketed import OwnAllReduce


class Tree(OwnAllReduce):
    """Each bucket of gradients climbs the tree and comes back as soon as the backward pass has filled it."""

    name = "tree"

    def prepare(self) -> None:
        settings, group = self.job.strategy, self.context.group
        assert isinstance(settings, spec.Tree)
        assert group is not None
        self.collective = TreeCollective(group, int(settings.slice_mb * 2**20))

    def reduce_(self, buffer: Tensor) -> Tensor:
        return self.collective.all_reduce_(buffer)

    def work_space(self) -> list[Tensor]:
        return self.collective.work_space
