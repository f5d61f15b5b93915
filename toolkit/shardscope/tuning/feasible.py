"""Whether a trial's memory will fit, by formula, before anything runs and without torch."""

from __future__ import annotations

import psutil

from shardscope.machine import usable_memory_bytes
from shardscope.runtime.preflight import preflight
from shardscope.spec import Job
from shardscope.spec.units import gib_text, positive, quantity


class MemoryLimit:
    """Finds trials that a rank cannot hold.

    Only what can be predicted is judged (`shardscope.runtime.preflight`); of anything else nothing is said, and it
    runs.

    Args:
        bytes_per_rank: What a rank may hold, or a text such as ``"2 GiB"``; None is its share of the machine's memory
            that is free.

    Raises:
        SpecError: It is not a number of bytes above 0.
    """

    def __init__(self, bytes_per_rank: float | str | None = None) -> None:
        self._given = (
            None
            if bytes_per_rank is None
            else positive(
                quantity(bytes_per_rank, "bytes", field="memory_limit"),
                field="memory_limit",
                given=bytes_per_rank,
            )
        )

    def fault(self, job: Job) -> str | None:
        """Why a job does not fit, as a sentence; None where it does or nothing is known."""
        needed = predicted_peak(job)
        if needed is None:
            return None
        limit = self._given if self._given is not None else _free_bytes() / job.world_size
        if needed <= limit:
            return None
        return (
            f"a rank would hold {gib_text(needed)} of the {gib_text(limit)} that it may; use a smaller batch, "
            "smaller micro-batches, or a higher ZeRO stage"
        )


def predicted_peak(job: Job) -> float | None:
    """Bytes on the rank that holds most; None where no formula describes the job."""
    found = preflight(job).prediction
    return None if found is None else found.peak_bytes


def _free_bytes() -> float:
    return float(min(psutil.virtual_memory().available, usable_memory_bytes()))
