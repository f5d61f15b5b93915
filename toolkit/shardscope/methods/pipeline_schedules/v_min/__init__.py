"""The V-Min pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class VMin(PipelineSchedule):
    """V-shaped schedule with the least activation memory: one third of 1F1B's, with two thirds of its bubble."""

    name = "v-min"
    title = "V-Min"
    source = "Qi et al., Pipeline parallelism with controllable memory, NeurIPS 2024 (arXiv 2405.15362)"
    year = 2024
    default_stages = 2
    least_stages = 2
    most_stages = 2
    v_shaped = True
    splits_backward = True
    held_terms = HeldTerms(0.0, 1 / 3, 4 / 3, is_rounded=True, in_thirds=True)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        from shardscope.analytic.schedules.building_block import v_min

        return v_min(rank, ranks, microbatches, held)

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Return a rank's peak activations, in micro-batches: at most (P + 4) // 3 on P ranks.

        This limit is one lower on ranks 0, 3, 6, ... if P modulo 3 is 2. With few micro-batches (m), all of them enter
        before the V is full, and the result is at most (m + rank + 1) / 2.
        """
        import numpy as np

        most = (ranks + 4) // 3 - ((ranks % 3 == 2) & (rank % 3 == 0))
        return np.minimum(np.minimum(microbatches, (microbatches + rank + 1) / 2), most)

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import v_min

        return v_min(case)
