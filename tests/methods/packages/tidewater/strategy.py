"""A strategy of all-to-all exchanges."""

from __future__ import annotations

from typing import Any

import shardscope as ss


@ss.register  # which an installed method may have and does not need
class Gathered(ss.BucketedStrategy):
    """Every rank gathers the buckets of all, and adds them up itself."""

    name = "gathered"
    carries = frozenset({"sums"})

    scale: float = 1.0

    def exchanged_bytes(self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1) -> float:
        return world_size * (world_size - 1) * gradient_bytes

    def sum_traffic(self, num_elements: int, element_bytes: int, step: Any) -> Any:
        from shardscope.analytic.communication.traffic import by_backend

        parts = step.world_size * num_elements * element_bytes
        return by_backend("all_gather", parts, step.world_size, backend=step.backend)

    def build(self, job: ss.Job, context: Any) -> Any:
        from tidewater._torch import OnOneRank

        return OnOneRank(job, context)
