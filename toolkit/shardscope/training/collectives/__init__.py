"""Collectives: the metered process group for all communication, and Shardscope's own algorithms that use it."""

from shardscope.training.collectives.hierarchical import HierarchicalAllReduce
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.collectives.ring import (
    RingAllReduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from shardscope.training.collectives.tree import TreeAllReduce, tree_all_reduce

__all__ = [
    "HierarchicalAllReduce", "MeteredProcessGroup", "RingAllReduce", "TreeAllReduce",
    "ring_all_gather", "ring_all_reduce", "ring_reduce_scatter", "tree_all_reduce",
]  # fmt: skip
