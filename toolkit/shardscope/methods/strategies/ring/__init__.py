"""Data parallelism over our own ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.spec.look import Look
from shardscope.spec.numbers import MessageMiB

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.job_step import JobStep
    from shardscope.spec.job import Job


class Ring(BucketedStrategy):
    """Our own ring: scatter-reduce, then all-gather, each rank talking to its two neighbours only.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (2009).
    """

    name = "ring"
    variant = "directions"
    family = "All-reduce"
    look = Look("#e06c2c")
    carries = frozenset({"sums", "packets", "layers", "steps"})

    directions: Literal[1, 2] = 1
    """1: every chunk travels clockwise; 2: half of each bucket travels each way, so both lanes of a link are used."""
    slice_mb: MessageMiB = 4.0
    """Longest message in MiB: a longer chunk is cut into slices, so that adding one overlaps receiving the next."""
    trace_chunks: bool = False
    """Write one event for every chunk sent, so that the ring can be watched hop by hop. Slows small steps."""

    @property
    def label(self) -> str:
        """``ring``, or ``ring:2`` for both directions."""
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

    def sum_room(self, sums: Sequence[tuple[int, int]], step: JobStep) -> int:
        from shardscope.analytic.memory.held import ring_room

        return ring_room(sums, step.world_size, directions=self.directions, slice_mb=self.slice_mb)

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.ring._torch import RingRank

        return RingRank(job, context)
