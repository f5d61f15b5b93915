"""The ZB-H1 pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class ZbH1(PipelineSchedule):
    """1F1B with weight gradients deferred into the bubble, at the same peak memory."""

    name = "zb-h1"
    title = "ZB-H1"
    source = "Qi et al., Zero bubble pipeline parallelism, ICLR 2024 (arXiv 2401.10241)"
    year = 2023
    splits_backward = True
    held_terms = HeldTerms(0.0, 1.0)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        from shardscope.analytic.schedules.split import zb_h1

        return zb_h1(rank, ranks, microbatches, held)

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Return a rank's peak activations in micro-batches: min(m, P) (m micro-batches, P ranks; section 2.1)."""
        import numpy as np

        return np.minimum(microbatches, ranks)

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import zb_h1

        return zb_h1(case)

    def ramp(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import interleaved_ramp

        return interleaved_ramp(case)
