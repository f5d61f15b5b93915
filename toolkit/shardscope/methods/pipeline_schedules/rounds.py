"""Base class of interleaved schedules, with any number of stages per rank and micro-batches in rounds of equal size."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from shardscope.spec.pipeline_schedule import PipelineSchedule


class InRounds(PipelineSchedule):
    """Base class of schedules in which a rank runs a round of micro-batches through one stage before its next stage."""

    default_stages = 2
    least_stages = 1
    most_stages = None

    def accepts(self, microbatches: int, ranks: int) -> bool:
        return microbatches >= ranks and microbatches % (microbatches // ranks) == 0

    def needs(self, ranks: int) -> str:
        return f"at least {ranks}, in rounds of equal size (a multiple of {ranks} always is)"

    @abstractmethod
    def last_round(self, rank: Any, ranks: Any) -> Any:
        """Return the number of forward passes on the rank's last stage before its first backward pass."""

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Return the micro-batches in flight after the warm-up: full rounds, and `last_round` on the last stage."""
        import numpy as np

        per_round = microbatches // np.maximum(1, microbatches // ranks)
        warmup = (held - 1) * per_round + self.last_round(rank, ranks)
        return np.minimum(warmup, microbatches * held) / held
