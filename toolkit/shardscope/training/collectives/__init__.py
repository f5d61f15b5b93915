"""Collectives: the metered process group under everything, and our own algorithms on top of it."""

from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.collectives.ring import Ring, ring_all_gather, ring_all_reduce, ring_reduce_scatter

__all__ = ["MeteredProcessGroup", "Ring", "ring_all_gather", "ring_all_reduce", "ring_reduce_scatter"]
