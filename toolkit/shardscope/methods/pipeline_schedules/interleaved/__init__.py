"""The Interleaved 1F1B pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.methods.pipeline_schedules.rounds import InRounds
from shardscope.spec.pipeline_schedule import HeldTerms, Operation


class Interleaved(InRounds):
    """1F1B with several short stages per rank: the pipeline fills sooner, but needs more messages and memory."""

    name = "interleaved"
    title = "Interleaved 1F1B"
    source = "Narayanan et al., Efficient large-scale language model training on GPU clusters, SC 2021"
    year = 2021
    torch_class = "ScheduleInterleaved1F1B"
    least_stages = 2
    held_terms = HeldTerms(1.0, 0.0)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        from shardscope.analytic.schedules.interleaved import interleaved

        return interleaved(rank, ranks, microbatches, held)

    def last_round(self, rank: Any, ranks: Any) -> Any:
        """Return 1 on the last rank, and 2 more for each rank before it (section 2.2)."""
        return 2 * (ranks - rank) - 1

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import flush

        return flush(case)
