"""The V-Half pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class VHalf(PipelineSchedule):
    """V-shaped schedule that needs half the activation memory of 1F1B and has half its bubble."""

    name = "v-half"
    title = "V-Half"
    source = "Qi et al., Pipeline parallelism with controllable memory, NeurIPS 2024 (arXiv 2405.15362)"
    year = 2024
    default_stages = 2
    least_stages = 2
    most_stages = 2
    v_shaped = True
    splits_backward = True
    held_terms = HeldTerms(0.0, 0.5, 1.0, is_rounded=True)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        from shardscope.analytic.schedules.building_block import v_half

        return v_half(rank, ranks, microbatches, held)

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Return a rank's peak activations, in micro-batches: min(m, P // 2 + 1, (m + rank + 1) / 2).

        There are m micro-batches and P ranks. The last term applies to few micro-batches, all of which enter before the
        V is full.
        """
        import numpy as np

        return np.minimum(np.minimum(microbatches, (microbatches + rank + 1) / 2), ranks // 2 + 1)

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import v_half

        return v_half(case)
