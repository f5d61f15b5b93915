"""Data parallelism over our own binary tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import MessageMiB

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.sharding import Ints
    from shardscope.spec.job import Job


class Tree(BucketedStrategy):
    """Our own binary tree: sums move up to rank 0, and the total moves back down, slice by slice.

    An all-reduce takes 2 log2(W) steps, and 2(W-1) with a ring. But a rank with two children sends three times the size
    of its gradients, and less than twice with a ring.
    """

    name = "tree"
    family = "All-reduce"
    look = MethodStyle("#11997a", "longdash", "triangle-up")
    carries = frozenset({"sums"})

    slice_mb: MessageMiB = 2.0
    """Longest message in MiB: longer buckets are cut into slices, which move up and down the tree at the same time."""

    def sum_traffic(self, num_elements: int, element_bytes: int, step: JobStep) -> Traffic:
        from shardscope.analytic.communication.traffic import by_tree

        return by_tree(num_elements, element_bytes, step.world_size, slice_mb=self.slice_mb)

    def sum_room(self, sums: Sequence[tuple[int, int]], step: JobStep) -> Ints:
        from shardscope.analytic.memory.work_space import tree_room

        return tree_room(sums, step.world_size, slice_mb=self.slice_mb)

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.tree._torch import TreeRank

        return TreeRank(job, context)
