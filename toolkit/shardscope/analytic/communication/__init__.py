"""Communication by formula: exact bytes for Shardscope's strategies, and times for many collective algorithms.

Each strategy's communication has its own module, such as `ring` or `zero`, which predicts bytes exactly, so that the
traffic of a run can be checked against the prediction. `collective_time` and `collective_volume` evaluate textbook
formulas for every algorithm in `algorithms`. `ring_time` gives the time of collectives in a layout's groups. The module
`prediction.job_time` predicts the time of a job's messages, and `simulator.collective` simulates them.
`crossover` finds where one algorithm becomes faster than another, and `compression` computes whether compressing
gradients saves time.
"""

from shardscope.analytic.communication.algorithms import ALGORITHMS, OPS
from shardscope.analytic.communication.collective import (
    CollectiveCost,
    collective_outcome,
    collective_term,
    collective_time,
    collective_volume,
)
from shardscope.analytic.communication.compression import (
    compression_cost,
    packed_bytes,
)
from shardscope.analytic.communication.crossover import Crossing, crossover, frontier, scaling_efficiency
from shardscope.analytic.communication.gossip import gossip_contraction, gossip_mix_bytes
from shardscope.analytic.communication.hierarchical import HierarchicalBytes, hierarchical_all_reduce_bytes
from shardscope.analytic.communication.overlap import exposed_time
from shardscope.analytic.communication.parameter_server import (
    parameter_server_control_bytes,
    parameter_server_pull_bytes,
    parameter_server_push_bytes,
)
from shardscope.analytic.communication.pipeline import pipeline_bytes, tied_bytes
from shardscope.analytic.communication.ring import (
    all_reduce_bytes,
    chunk_sizes,
    group_strides,
    ring_all_gather_bytes,
    ring_all_reduce_bytes,
    ring_reduce_scatter_bytes,
    ring_time,
    spanning_link,
    stepwise_bytes,
)
from shardscope.analytic.communication.traffic import Sent, Traffic, packets, sent_bytes
from shardscope.analytic.communication.tree import tree_all_reduce_bytes
from shardscope.analytic.communication.zero import (
    ShardCollectives,
    agreement_traffic,
    flat_shards_traffic,
    fully_sharded_traffic,
)

__all__ = [
    "agreement_traffic",
    "ALGORITHMS",
    "OPS",
    "CollectiveCost",
    "Crossing",
    "collective_outcome",
    "collective_term",
    "collective_time",
    "collective_volume",
    "compression_cost",
    "crossover",
    "frontier",
    "packed_bytes",
    "scaling_efficiency",
    "HierarchicalBytes",
    "all_reduce_bytes",
    "chunk_sizes",
    "exposed_time",
    "fully_sharded_traffic",
    "gossip_contraction",
    "gossip_mix_bytes",
    "group_strides",
    "hierarchical_all_reduce_bytes",
    "parameter_server_control_bytes",
    "parameter_server_pull_bytes",
    "parameter_server_push_bytes",
    "pipeline_bytes",
    "ring_all_gather_bytes",
    "ring_all_reduce_bytes",
    "ring_reduce_scatter_bytes",
    "ring_time",
    "spanning_link",
    "tied_bytes",
    "stepwise_bytes",
    "tree_all_reduce_bytes",
    "Sent",
    "ShardCollectives",
    "Traffic",
    "packets",
    "sent_bytes",
    "flat_shards_traffic",
]
