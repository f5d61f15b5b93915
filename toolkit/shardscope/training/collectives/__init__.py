"""Collectives: the metered process group under everything, and our own algorithms on top of it."""

from shardscope.training.collectives.hierarchical import Hierarchical
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.collectives.ring import Ring, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from shardscope.training.collectives.tree import Tree, tree_all_reduce

__all__ = [
    "Hierarchical", "MeteredProcessGroup", "Ring", "Tree", "ring_all_gather",
    "ring_all_reduce", "ring_reduce_scatter", "tree_all_reduce",
]  # fmt: skip
