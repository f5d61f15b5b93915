"""Our own collectives against gloo's, 4 ranks on this machine, interleaved in one run.

python tests/benchmarks/collectives.py [world_size]
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks._report import compare
from conformance.ranks import RankPool
from shardscope.methods.strategies.hierarchical import Hierarchical as HierarchicalSpec
from shardscope.training.collectives import HierarchicalAllReduce, RingAllReduce, TreeAllReduce
from shardscope.training.context import RankContext

SIZES_MB = (16, 32, 64)
ROUNDS = 15
IN_A_ROW = 3
"""Calls in one sample: the buckets of a training step follow each other in the same way."""


def measure(context: RankContext, megabytes: int) -> str:
    """Time all algorithms on a tensor of this size; the table as text."""
    tensor = torch.ones(megabytes * 2**18 // context.world_size * context.world_size)
    part = torch.empty(tensor.numel() // context.world_size)
    one, both = RingAllReduce(context.group), RingAllReduce(context.group, directions=2)
    tree = TreeAllReduce(context.group)
    per_node = HierarchicalSpec().ranks_per_node(context.world_size)
    levels = HierarchicalAllReduce(context.group, per_node)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def fresh(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for _ in range(IN_A_ROW):
                call()
            tensor.fill_(1.0)  # sums would overflow after some rounds

        return run

    reduces = {
        "gloo all_reduce": lambda: dist.all_reduce(tensor),
        "ring": lambda: one.all_reduce_(tensor),
        "ring, both directions": lambda: both.all_reduce_(tensor),
        "tree": lambda: tree.all_reduce_(tensor),
        f"hierarchical, {per_node} ranks a node": lambda: levels.all_reduce_(tensor),
    }
    scatters = {
        "gloo reduce_scatter": lambda: reduce_scatter(part, tensor),
        "ring reduce_scatter": lambda: one.reduce_scatter_(tensor),
    }
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        for calls, baseline in ((reduces, "gloo all_reduce"), (scatters, "gloo reduce_scatter")):
            compare({name: fresh(call) for name, call in calls.items()}, rounds=ROUNDS, baseline=baseline)
    return table.getvalue()


def main() -> None:
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    pool = RankPool(world_size)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for megabytes in SIZES_MB:
                tables = pool.run(lambda context, mb=megabytes: measure(context, mb), Path(folder))
                print(f"\n{megabytes} MB, {world_size} ranks\n{tables[0]}", end="", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    from benchmarks.collectives import main as run  # the ranks import this module by its name

    run()
