"""The ZB-H2 pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class ZbH2(PipelineSchedule):
    """ZB-H1 with nearly twice as many warm-up forward passes, so that no rank waits for the first gradient."""

    name = "zb-h2"
    title = "ZB-H2"
    source = "Qi et al., Zero bubble pipeline parallelism, ICLR 2024 (arXiv 2401.10241)"
    year = 2023
    splits_backward = True
    held_terms = HeldTerms(0.0, 2.0, -1.0)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        from shardscope.analytic.schedules.split import zb_h2

        return zb_h2(rank, ranks, microbatches, held)

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Return a rank's peak activations in micro-batches: min(m, 2P - 1) (m micro-batches, P ranks; section 2.2)."""
        import numpy as np

        return np.minimum(microbatches, 2 * ranks - 1)

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import zb_h2

        return zb_h2(case)

    def ramp(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import zb_h2_ramp

        return zb_h2_ramp(case)
