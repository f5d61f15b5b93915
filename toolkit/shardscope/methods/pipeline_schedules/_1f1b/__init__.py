"""The 1F1B pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.spec.pipeline_schedule import HeldTerms, Operation, PipelineSchedule


class OneForwardOneBackward(PipelineSchedule):
    """Runs each backward pass as soon as it is ready.

    A rank has at most one micro-batch in flight for each stage from its own to the last.
    """

    name = "1f1b"
    title = "1F1B"
    source = "Narayanan et al., Memory-efficient pipeline-parallel DNN training, ICML 2021"
    year = 2021
    torch_class = "Schedule1F1B"
    held_terms = HeldTerms(1.0, 0.0)

    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        """One forward pass for each stage from this one to the last, then backward and forward passes in turn."""
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
        """P - rank micro-batches (section 3.2)."""
        import numpy as np

        return np.minimum(microbatches, ranks - rank)

    def bubble(self, case: Any) -> Any:
        from shardscope.analytic.schedules.paths import flush

        return flush(case)
