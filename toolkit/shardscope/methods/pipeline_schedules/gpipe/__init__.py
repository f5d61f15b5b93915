"""The GPipe pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class GPipe(PipelineSchedule):
    """Runs all forward passes, then all backward passes."""

    name = "gpipe"
    title = "GPipe"
    source = "Huang et al., GPipe, NeurIPS 2019"
    year = 2019
    torch_class = "ScheduleGPipe"
    blocks = True
    held_terms = HeldTerms(0.0, 0.0, inf)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        """Return all forward passes, then all backward passes (figure 2c)."""
        return [(kind, rank, i) for kind in "FB" for i in range(microbatches)]

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Return a rank's peak activations, in micro-batches: all micro-batches are in flight at the same time."""
        return microbatches

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import flush

        return flush(case)
