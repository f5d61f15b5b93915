"""Collective algorithms by name. Each is an `Algorithm` with its formulas, options and source.

To add one, write a function from a `CollectiveInput` to its `Cost` in a module here and list it below.
"""

from shardscope.analytic.communication.algorithms._algorithm import OPS, Algorithm, Option
from shardscope.analytic.communication.algorithms.doubling import HALVING_DOUBLING, RECURSIVE_DOUBLING
from shardscope.analytic.communication.algorithms.in_network import NVLS, OPTICAL_RING, SHARP
from shardscope.analytic.communication.algorithms.pairs import BRUCK, DIRECT, PAIRWISE, SCATTER_GATHER
from shardscope.analytic.communication.algorithms.ring import BIDIRECTIONAL_RING, CHAIN, RING
from shardscope.analytic.communication.algorithms.server import BYTEPS, PARAMETER_SERVER
from shardscope.analytic.communication.algorithms.tree import DOUBLE_TREE, PIPELINED_TREE, TREE
from shardscope.analytic.communication.algorithms.two_level import HIERARCHICAL, TORUS

ALGORITHMS: dict[str, Algorithm] = {
    "parameter-server": PARAMETER_SERVER,
    "byteps": BYTEPS,
    "ring": RING,
    "bidirectional-ring": BIDIRECTIONAL_RING,
    "chain": CHAIN,
    "tree": TREE,
    "pipelined-tree": PIPELINED_TREE,
    "double-binary-tree": DOUBLE_TREE,
    "halving-doubling": HALVING_DOUBLING,
    "recursive-doubling": RECURSIVE_DOUBLING,
    "hierarchical": HIERARCHICAL,
    "torus-2d": TORUS,
    "in-network": SHARP,
    "nvls": NVLS,
    "optical-ring": OPTICAL_RING,
    "scatter-all-gather": SCATTER_GATHER,
    "pairwise": PAIRWISE,
    "bruck": BRUCK,
    "direct": DIRECT,
}
"""All algorithms, in the order in which legends show them."""

__all__ = ["ALGORITHMS", "OPS", "Algorithm", "Option"]
