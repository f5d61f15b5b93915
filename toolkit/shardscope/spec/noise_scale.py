"""Which jobs can measure their gradient noise scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.errors import SpecError
from shardscope.spec.strategy import strategies_where

if TYPE_CHECKING:
    from shardscope.spec.job import Job


def check_noise_scale(job: Job) -> None:
    """Refuse to measure where there are no two batch sizes to compare, or no mean gradient.

    Raises:
        SpecError: With what can.
    """
    if not job.record.noise_scale:
        return
    reason = job.strategy.hides_noise_because
    if reason is not None:
        able = strategies_where(lambda strategy: strategy.hides_noise_because is None)
        raise SpecError(
            f"record.noise_scale=True does not go with strategy={job.strategy.label!r}, where {reason}; "
            f"use one of {', '.join(able)}"
        )
    if job.compression.period > 1:
        raise SpecError(
            f"record.noise_scale=True does not go with compression={job.compression.name!r}, where each rank has "
            "parameters of its own; use another method, or none"
        )
    share = job.batch.per_rank(job.num_data_ranks)
    if job.num_data_ranks * job.num_micro_batches == 1:
        raise SpecError(
            f"record.noise_scale=True compares gradients of small batches with their mean, and one rank with "
            f"batch.micro_batch={share} has only one; "
            + (f"use a micro_batch below {share}, or more ranks" if share > 1 else "use a larger batch")
        )
