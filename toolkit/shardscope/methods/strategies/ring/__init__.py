"""Data parallelism over Shardscope's own ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import MessageMiB

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import Exchange, When
    from shardscope.analytic.job_step import JobStep
    from shardscope.spec.job import Job


class Ring(BucketedStrategy):
    """Shardscope's own ring all-reduce: reduce-scatter, then all-gather; ranks communicate only with neighbours.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (2009).
    """

    name = "ring"
    variant = "directions"
    family = "All-reduce"
    look = MethodStyle("#e06c2c")
    carries = frozenset({"sums", "packets", "layers", "steps"})

    directions: Literal[1, 2] = 1
    """Number of directions: with 1, all chunks travel clockwise; with 2, half of each bucket travels in each direction,
    so that links are used both ways."""
    slice_mb: MessageMiB = 4.0
    """Maximum message size in MiB: larger chunks are split into slices, so that summing overlaps receiving."""

    @property
    def label(self) -> str:
        """Short name in tables and plots: ``ring``, or ``ring:2`` with both directions."""
        return self.name if self.directions == 1 else f"{self.name}:2"

    @property
    def ring_directions(self) -> int:
        return self.directions

    def sum_traffic(self, num_elements: int, element_bytes: int, step: JobStep) -> Traffic:
        from shardscope.analytic.communication.traffic import by_ring

        return by_ring(
            "all_reduce", num_elements, element_bytes, step.world_size, directions=self.directions,
            slice_mb=self.slice_mb,
        )  # fmt: skip

    def sum_exchanges(
        self, num_elements: int, element_bytes: int, step: JobStep, when: When
    ) -> list[Exchange]:
        from shardscope.analytic.communication.plan import Exchange, ring_rounds

        rounds = ring_rounds(
            "all_reduce", num_elements, element_bytes, step.world_size, directions=self.directions
        )
        return [Exchange("ring_all_reduce", when, rounds)]

    def sum_room(self, sums: Sequence[tuple[int, int]], step: JobStep) -> int:
        from shardscope.analytic.memory.held import ring_buffer_bytes

        return ring_buffer_bytes(sums, step.world_size, directions=self.directions, slice_mb=self.slice_mb)

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.ring._torch import RingRank

        return RingRank(job, context)
