"""Interleaved zero bubble, a pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class ZeroBubble(PipelineSchedule):
    """Interleaved, with the weights' gradients put off into what would be bubble at the end."""

    name = "zero-bubble"
    title = "Interleaved zero bubble"
    source = "Qi et al., Zero bubble pipeline parallelism, ICLR 2024 (arXiv 2401.10241)"
    year = 2023
    torch_class = "ScheduleInterleavedZeroBubble"
    default_stages = 2
    least_stages = 1
    most_stages = None
    splits_backward = True
    held_terms = HeldTerms(0.0, 1.0)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        from shardscope.analytic.schedules.interleaved import zero_bubble

        return zero_bubble(rank, ranks, microbatches, held)

    def accepts(self, microbatches: int, ranks: int) -> bool:
        return microbatches >= ranks and microbatches % (microbatches // ranks) == 0

    def needs(self, ranks: int) -> str:
        return f"at least {ranks}, in rounds of equal size (a multiple of {ranks} always is)"

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """As ZB-H1, on stages that are shorter."""
        import numpy as np

        per_round = microbatches // np.maximum(1, microbatches // ranks)
        return np.minimum((held - 1) * per_round + ranks, microbatches * held) / held

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.paths import interleaved_zero_bubble

        return interleaved_zero_bubble(case)

    def ramp(self, case: Any) -> Any:
        from shardscope.analytic.schedules.paths import interleaved_ramp

        return interleaved_ramp(case)
