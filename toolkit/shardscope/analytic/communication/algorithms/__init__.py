"""Catalogue of collective algorithms. Each is an `Algorithm`, with cost functions, formulas, options and source.

To add an algorithm, write a module of this package with a function that takes a `CollectiveInput` and returns a `Cost`.
Then add an `Algorithm` to the dictionary below.
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
"""All algorithms by name, in the order of legends."""

__all__ = ["ALGORITHMS", "OPS", "Algorithm", "Option"]
