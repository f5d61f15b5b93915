"""Data parallelism over Shardscope's own binary tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.spec.look import Arrangement, MethodStyle
from shardscope.spec.numbers import MessageMiB

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import Exchange, When
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.sharding import Ints
    from shardscope.spec.job import Job


class Tree(BucketedStrategy):
    """Shardscope's own tree all-reduce: sums move up a binary tree to rank 0, and the total moves back down.

    With W ranks, an all-reduce takes 2 log2(W) communication steps, compared with 2(W-1) on a ring. But a rank with two
    children sends three times the size of its gradients, compared with less than twice on a ring.
    """

    name = "tree"
    family = "All-reduce"
    look = MethodStyle("#11997a", "longdash", "triangle-up")
    carries = frozenset({"sums"})

    slice_mb: MessageMiB = 2.0
    """Maximum message size in MiB: larger buckets are split into slices, which move up and down the tree
    concurrently."""

    def sum_traffic(self, num_elements: int, element_bytes: int, step: JobStep) -> Traffic:
        from shardscope.analytic.communication.traffic import by_tree

        return by_tree(num_elements, element_bytes, step.world_size, slice_mb=self.slice_mb)

    def sum_exchanges(
        self, num_elements: int, element_bytes: int, step: JobStep, when: When
    ) -> list[Exchange]:
        from shardscope.analytic.communication.plan import Exchange, tree_rounds

        return [Exchange("tree_all_reduce", when, tree_rounds(num_elements * element_bytes, step.world_size))]

    def arrangement(self, world_size: int) -> Arrangement:
        """Return a binary tree with rank 0 on top."""
        return Arrangement("tree")

    def sum_room(self, sums: Sequence[tuple[int, int]], step: JobStep) -> Ints:
        from shardscope.analytic.memory.work_space import tree_buffer_bytes

        return tree_buffer_bytes(sums, step.world_size, slice_mb=self.slice_mb)

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.tree._torch import TreeRank

        return TreeRank(job, context)
