"""The interleaved zero-bubble pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.methods.pipeline_schedules.rounds import InRounds
from shardscope.spec.pipeline_schedule import HeldTerms, Operation


class ZeroBubble(InRounds):
    """Interleaved 1F1B with weight gradients deferred into the bubble at the end."""

    name = "zero-bubble"
    title = "Interleaved zero bubble"
    source = "Qi et al., Zero bubble pipeline parallelism, ICLR 2024 (arXiv 2401.10241)"
    year = 2023
    torch_class = "ScheduleInterleavedZeroBubble"
    splits_backward = True
    held_terms = HeldTerms(0.0, 1.0)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        from shardscope.analytic.schedules.interleaved import zero_bubble

        return zero_bubble(rank, ranks, microbatches, held)

    def last_round(self, rank: Any, ranks: Any) -> Any:
        """Return one forward pass per rank of the pipeline, as in ZB-H1, which has longer stages."""
        return ranks

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import interleaved_zero_bubble

        return interleaved_zero_bubble(case)

    def ramp(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import interleaved_ramp

        return interleaved_ramp(case)
