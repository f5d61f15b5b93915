"""Interleaved 1F1B, a pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class Interleaved(PipelineSchedule):
    """Several short stages a rank: the pipeline fills sooner, for more sends and more memory."""

    name = "interleaved"
    title = "Interleaved 1F1B"
    source = "Narayanan et al., Efficient large-scale language model training on GPU clusters, SC 2021"
    year = 2021
    torch_class = "ScheduleInterleaved1F1B"
    default_stages = 2
    least_stages = 2
    most_stages = None
    held_terms = HeldTerms(1.0, 0.0)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        from shardscope.analytic.schedules.interleaved import interleaved

        return interleaved(rank, ranks, microbatches, held)

    def accepts(self, microbatches: int, ranks: int) -> bool:
        return microbatches >= ranks and microbatches % (microbatches // ranks) == 0

    def needs(self, ranks: int) -> str:
        return f"at least {ranks}, in rounds of equal size (a multiple of {ranks} always is)"

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Its warm-up (section 2.2)."""
        import numpy as np

        per_round = microbatches // np.maximum(1, microbatches // ranks)
        warmup = (held - 1) * per_round + 2 * (ranks - rank) - 1
        return np.minimum(warmup, microbatches * held) / held

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.paths import flush

        return flush(case)
