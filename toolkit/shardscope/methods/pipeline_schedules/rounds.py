"""Base class of interleaved schedules, with any number of stages per rank and micro-batches in rounds of equal size."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from shardscope.spec.pipeline_schedule import PipelineSchedule


class InRounds(PipelineSchedule):
    """Base class of schedules in which each rank runs a whole round of micro-batches on one of its stages at a time."""

    default_stages = 2
    least_stages = 1
    most_stages = None

    def accepts(self, microbatches: int, ranks: int) -> bool:
        return microbatches >= ranks and microbatches % (microbatches // ranks) == 0

    def needs(self, ranks: int) -> str:
        return f"at least {ranks}, in rounds of equal size (as with any multiple of {ranks})"

    @abstractmethod
    def last_round(self, rank: Any, ranks: Any) -> Any:
        """Return the number of forward passes on a rank's last stage before the rank's first backward pass."""

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:
        """Return the peak number of micro-batches in flight: full rounds, plus `last_round` on the rank's last stage.

        On a rank with several stages, a micro-batch in flight on one of v stages counts as 1/v.
        """
        import numpy as np

        per_round = microbatches // np.maximum(1, microbatches // ranks)
        warmup = (held - 1) * per_round + self.last_round(rank, ranks)
        return np.minimum(warmup, microbatches * held) / held
