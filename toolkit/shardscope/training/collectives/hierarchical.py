"""Two-level ring all-reduce, for nodes whose internal links are faster than the links between nodes.

First, a ring inside each node reduce-scatters the tensor over the node's ranks. Then the ranks at the same position in
their nodes form a ring across nodes and all-reduce their shards. Finally, the ring inside each node all-gathers the
shards. With n nodes and m ranks per node, a rank sends 2(m-1)/m times the tensor's size inside its node, and 2(n-1)/n
times the size of its shard (1/m of the tensor) across nodes. So the slow links between nodes carry about 1/m of the
bytes that a single ring over all ranks would send through them.

The traffic of the three phases is recorded under the names of the ring collectives: ``ring_reduce_scatter`` and
``ring_all_gather`` inside a node, ``ring_all_reduce`` across nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardscope.errors import SpecError
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.collectives.ring import SLICE_BYTES, RingAllReduce


@dataclass
class HierarchicalAllReduce:
    """All-reduce with rings inside and across nodes.

    Attributes:
        group: The metered process group. Rank r is in node ``r // per_node``, at position ``r % per_node``.
        per_node: Number of ranks per node; it must divide the size of the group.
        slice_bytes: Maximum size of a message, in bytes, as in `RingAllReduce`.

    Raises:
        SpecError: `per_node` does not divide the size of the group.
    """

    group: MeteredProcessGroup
    per_node: int
    slice_bytes: int = SLICE_BYTES

    def __post_init__(self) -> None:
        rank, world_size = self.group.rank(), self.group.size()
        if world_size % self.per_node:
            raise SpecError(
                f"per_node={self.per_node} does not divide the {world_size} ranks of the group; use a divisor of "
                f"{world_size}"
            )
        first, position = rank - rank % self.per_node, rank % self.per_node
        node = range(first, first + self.per_node)
        peers = range(position, world_size, self.per_node)
        self.inside = RingAllReduce(self.group, slice_bytes=self.slice_bytes, members=node)
        self.across = RingAllReduce(self.group, slice_bytes=self.slice_bytes, members=peers)

    @property
    def work_space(self) -> list[torch.Tensor]:
        """Buffers that are reused between calls."""
        return [*self.inside.work_space, *self.across.work_space]

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place. It must be contiguous and have the same shape on every rank."""
        if self.per_node == 1:
            return self.across.all_reduce_(tensor)
        if self.per_node == self.group.size():
            return self.inside.all_reduce_(tensor)
        self.across.all_reduce_(self.inside.reduce_scatter_(tensor))
        return self.inside.all_gather_(tensor)
