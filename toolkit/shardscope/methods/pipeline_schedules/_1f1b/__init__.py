"""The 1F1B pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class OneForwardOneBackward(PipelineSchedule):
    """Runs each backward pass as soon as possible, which limits the number of micro-batches in flight.

    The limit on a rank is the number of stages from its own stage to the last.
    """

    name = "1f1b"
    title = "1F1B"
    source = "Narayanan et al., Memory-efficient pipeline-parallel DNN training, ICML 2021"
    year = 2021
    torch_class = "Schedule1F1B"
    blocks = True
    held_terms = HeldTerms(1.0, 0.0)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        """Return one warm-up forward pass for this stage and each later one, then alternating backward and forward
        passes.
        """
        warmup = min(microbatches, ranks - rank)
        ops = [("F", rank, i) for i in range(warmup)]
        for i in range(microbatches):
            ops.append(("B", rank, i))
            if warmup + i < microbatches:
                ops.append(("F", rank, warmup + i))
        return ops

    def accepts(self, microbatches: int, ranks: int) -> bool:
        return microbatches >= ranks

    def needs(self, ranks: int) -> str:
        return f"at least {ranks}"

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Return a rank's peak activations in micro-batches: min(m, P - rank) (section 3.2).

        There are m micro-batches and P ranks.
        """
        import numpy as np

        return np.minimum(microbatches, ranks - rank)

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.closed import flush

        return flush(case)
