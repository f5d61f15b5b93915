"""Data parallelism with two levels of rings, inside nodes and across them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

from shardscope.errors import SpecError
from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.spec.divisors import divisors_text
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import Count, MessageMiB

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import Exchange, When
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.sharding import Ints
    from shardscope.spec.job import Job


class Hierarchical(BucketedStrategy):
    """Two levels of rings: reduce-scatter inside each node, all-reduce across nodes, all-gather inside each node.

    Links between nodes carry 1/`per_node` of the bytes that they carry with a single ring over all ranks.
    """

    name = "hierarchical"
    variant = "per_node"
    family = "All-reduce"
    look = MethodStyle("#5f6fd6", "longdashdot", "diamond")
    carries = frozenset({"sums"})

    per_node: Count | None = None
    """Ranks per node, a divisor of the world size; None means the number of ranks on each machine of the run. On a
    single machine, nodes are simulated, and None means the largest divisor of the world size that is at most its
    square root: 2 nodes with 2 ranks each for 4 ranks, and nodes with one rank each for a prime world size."""
    slice_mb: MessageMiB = 4.0
    """Maximum message size in MiB: larger chunks are split into slices, so that summing overlaps receiving."""

    @property
    def label(self) -> str:
        """Short name in tables and plots: ``hierarchical``, or ``hierarchical:8`` with 8 ranks per node."""
        return self.name if self.per_node is None else f"{self.name}:{self.per_node}"

    def ranks_per_node(self, world_size: int, local_world_size: int | None = None) -> int:
        """Return the number of ranks per node, with the default filled in.

        Args:
            world_size: Total number of ranks.
            local_world_size: Number of ranks on each machine if there are several; None for one machine.
        """
        if self.per_node is not None:
            return self.per_node
        if local_world_size is not None and local_world_size < world_size:
            return local_world_size
        return next(size for size in range(isqrt(world_size), 0, -1) if world_size % size == 0)

    def check(self, job: Job) -> None:
        """Reject a number of ranks per node that does not divide the world size."""
        if self.per_node is not None and job.world_size % self.per_node:
            raise SpecError(
                f"strategy.per_node={self.per_node} does not divide world_size={job.world_size}; "
                f"use one of {divisors_text(job.world_size, near=self.per_node)}"
            )

    def sum_traffic(self, num_elements: int, element_bytes: int, step: JobStep) -> Traffic:
        from shardscope.analytic.communication.traffic import by_hierarchy

        per_node = self.ranks_per_node(step.world_size, step.world_size)
        return by_hierarchy(num_elements, element_bytes, step.world_size, per_node, slice_mb=self.slice_mb)

    def sum_exchanges(
        self, num_elements: int, element_bytes: int, step: JobStep, when: When
    ) -> list[Exchange]:
        """Return a reduce-scatter inside nodes, an all-reduce of each shard across nodes, and an all-gather inside."""
        from shardscope.analytic.communication import chunk_sizes
        from shardscope.analytic.communication.plan import Exchange, in_groups, ring_rounds

        world_size, ranks = step.world_size, range(step.world_size)
        per_node = self.ranks_per_node(world_size, world_size)
        if per_node in (1, world_size):
            return [
                Exchange(
                    "ring_all_reduce",
                    when,
                    ring_rounds("all_reduce", num_elements, element_bytes, world_size),
                )
            ]
        nodes = [tuple(ranks[start : start + per_node]) for start in ranks[::per_node]]

        def inside(op: str) -> Exchange:
            rounds = ring_rounds(op, num_elements, element_bytes, per_node)
            return Exchange(f"ring_{op}", when, in_groups(rounds, nodes))

        across = [
            Exchange(
                "ring_all_reduce",
                when,
                in_groups(
                    ring_rounds("all_reduce", int(shard), element_bytes, len(nodes)),
                    [tuple(node[place] for node in nodes)],
                ),
            )
            for place, shard in enumerate(chunk_sizes(num_elements, per_node))
        ]
        return [inside("reduce_scatter"), _at_once(across), inside("all_gather")]

    def cargo(self, collective: str) -> str:
        """Return ``gradients`` for all-gathers too, because they gather sums of gradients."""
        return "gradients" if collective.startswith("ring_") else super().cargo(collective)

    def sum_room(self, sums: Sequence[tuple[int, int]], step: JobStep) -> Ints:
        from shardscope.analytic.memory.work_space import hierarchy_buffer_bytes

        per_node = self.ranks_per_node(step.world_size, step.world_size)
        return hierarchy_buffer_bytes(sums, step.world_size, per_node, slice_mb=self.slice_mb)

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.hierarchical._torch import HierarchicalRank

        return HierarchicalRank(job, context)


def _at_once(exchanges: Sequence[Exchange]) -> Exchange:
    """Merge simultaneous exchanges with equal numbers of rounds: each round contains the messages of all exchanges."""
    from dataclasses import replace

    from shardscope.analytic.communication.plan import Round

    rounds = zip(*(each.rounds for each in exchanges), strict=True)
    merged = tuple(Round(same[0].name, tuple(m for each in same for m in each.moves)) for same in rounds)
    return replace(exchanges[0], rounds=merged)
