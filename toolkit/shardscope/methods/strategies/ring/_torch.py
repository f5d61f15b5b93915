"""Data parallelism over Shardscope's own ring."""

from __future__ import annotations

from torch import Tensor

from shardscope.methods.strategies import ring
from shardscope.training.collectives.ring import RingAllReduce as RingCollective
from shardscope.training.strategies.own_all_reduce import OwnAllReduce


class RingRank(OwnAllReduce):
    """Strategy that all-reduces each gradient bucket over the ring as soon as the backward pass has filled it."""

    settings: ring.Ring

    def prepare(self) -> None:
        settings, group = self.settings, self.context.group
        assert group is not None
        self.ring = RingCollective(group, settings.directions, int(settings.slice_mb * 2**20))

    def reduce_(self, buffer: Tensor) -> Tensor:
        return self.ring.all_reduce_(buffer)

    def work_space(self) -> list[Tensor]:
        return self.ring.work_space
