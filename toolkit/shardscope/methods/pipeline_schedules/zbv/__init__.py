"""The ZB-V pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class Zbv(PipelineSchedule):
    """V-shaped schedule with two stages per rank, down the ranks and back up: almost no bubble, and 1F1B's memory."""

    name = "zbv"
    title = "ZB-V"
    source = "Qi et al., Zero bubble pipeline parallelism, ICLR 2024 (arXiv 2401.10241)"
    year = 2023
    torch_class = "ScheduleZBVZeroBubble"
    default_stages = 2
    least_stages = 2
    most_stages = 2
    v_shaped = True
    splits_backward = True
    held_terms = HeldTerms(0.0, 1.0, is_rounded=True)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        from shardscope.analytic.schedules.v_shaped import zbv

        return zbv(rank, ranks, microbatches, held)

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Return a rank's peak activations, in micro-batches: min(m, P, (m + rank + 1) / 2).

        There are m micro-batches and P ranks; the limit P is from section 6. The last term applies to few
        micro-batches, all of which enter before the V is full.
        """
        import numpy as np

        return np.minimum(np.minimum(microbatches, (microbatches + rank + 1) / 2), ranks)

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import zbv

        return zbv(case)

    def ramp(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import zbv_ramp

        return zbv_ramp(case)
