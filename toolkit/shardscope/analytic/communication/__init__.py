"""Bytes on the wire, by formula: a module for each way of moving them."""

from shardscope.analytic.communication.all_reduce import all_reduce_bytes
from shardscope.analytic.communication.gossip import gossip_contraction, gossip_mix_bytes
from shardscope.analytic.communication.hierarchical import HierarchicalBytes, hierarchical_all_reduce_bytes
from shardscope.analytic.communication.parameter_server import (
    parameter_server_control_bytes,
    parameter_server_pull_bytes,
    parameter_server_push_bytes,
)
from shardscope.analytic.communication.pipeline import pipeline_bytes, tied_bytes
from shardscope.analytic.communication.ring import (
    chunk_sizes,
    ring_all_gather_bytes,
    ring_all_reduce_bytes,
    ring_reduce_scatter_bytes,
)
from shardscope.analytic.communication.tree import tree_all_reduce_bytes
from shardscope.analytic.communication.zero import fully_sharded_bytes, zero_1_bytes

__all__ = [
    "HierarchicalBytes",
    "all_reduce_bytes",
    "chunk_sizes",
    "fully_sharded_bytes",
    "gossip_contraction",
    "gossip_mix_bytes",
    "hierarchical_all_reduce_bytes",
    "parameter_server_control_bytes",
    "parameter_server_pull_bytes",
    "parameter_server_push_bytes",
    "pipeline_bytes",
    "ring_all_gather_bytes",
    "ring_all_reduce_bytes",
    "ring_reduce_scatter_bytes",
    "tied_bytes",
    "tree_all_reduce_bytes",
    "zero_1_bytes",
]
