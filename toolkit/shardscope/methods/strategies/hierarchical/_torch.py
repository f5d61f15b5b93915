"""Data parallelism with two levels of rings, inside nodes and across them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.errors import SpecError
from shardscope.methods.strategies import hierarchical
from shardscope.training.collectives.hierarchical import HierarchicalAllReduce as HierarchicalCollective
from shardscope.training.strategies.own_all_reduce import OwnAllReduce


class HierarchicalRank(OwnAllReduce):
    """Strategy that all-reduces each full gradient bucket, first inside nodes, then across them."""

    settings: hierarchical.Hierarchical

    def prepare(self) -> None:
        settings, context = self.settings, self.context
        assert context.group is not None
        per_node = settings.ranks_per_node(context.world_size, context.local_world_size)
        if settings.per_node is None and context.local_world_size is not None:
            self._check_machines(context.local_world_size)
        self.collective = HierarchicalCollective(context.group, per_node, int(settings.slice_mb * 2**20))

    def reduce_(self, buffer: Tensor) -> Tensor:
        return self.collective.all_reduce_(buffer)

    def work_space(self) -> list[Tensor]:
        return self.collective.work_space

    def _check_machines(self, local_world_size: int) -> None:
        """Reject machines with different numbers of ranks; the error is raised on all ranks."""
        context = self.context
        if local_world_size == context.world_size:
            return
        own = torch.tensor([local_world_size], device=context.device)
        sizes = [torch.empty_like(own) for _ in range(context.world_size)]
        dist.all_gather(sizes, own, group=context.group)
        found = sorted({int(size) for size in sizes})
        if len(found) > 1:
            raise SpecError(
                f"strategy='hierarchical' needs nodes of equal size, but the machines have {found} ranks; "
                "set strategy.per_node to a number that divides all of these"
            )
