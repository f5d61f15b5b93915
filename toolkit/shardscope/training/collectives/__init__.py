"""Collectives: the metered process group for all communication, and Shardscope's own algorithms that use it."""

from shardscope.training.collectives.hierarchical import HierarchicalAllReduce
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.collectives.ring import RingAllReduce
from shardscope.training.collectives.tree import TreeAllReduce

__all__ = ["HierarchicalAllReduce", "MeteredProcessGroup", "RingAllReduce", "TreeAllReduce"]
