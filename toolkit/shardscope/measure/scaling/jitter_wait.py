"""How long the ranks of a predicted step wait for the slowest of them, because their computing times differ."""

from __future__ import annotations

from shardscope.analytic.stragglers import Jitter
from shardscope.prediction.job import JobPrediction

_PASSES = ("forward", "backward", "compute", "recomputation")
"""Names of the parts of a step time in which ranks compute, of jobs and of layouts."""


def jitter_wait_s(found: JobPrediction, jitter: Jitter) -> float:
    """Return the time that a predicted step lasts longer because of jitter, in seconds.

    It is the expected computing time of the slowest rank, beyond the mean. Measured jitter is relative to the computing
    time, so it is used for other times as well. Without gradients of the slowest ranks (backup workers), or with ranks
    that meet every few steps (local SGD), less is waited for; it is 0 if ranks do not wait for each other at all.

    The stated FLOP/s of an emulated cluster are without jitter. The constants of this machine and of GPUs were fitted
    to ranks that waited as well, so that what is added for few ranks is counted twice.

    Args:
        found: The prediction, without jitter.
        jitter: The jitter of the ranks.
    """
    job, strategy = found.job, found.job.strategy
    if job.num_data_ranks == 1 or (strategy.unwaited_because is not None and not strategy.num_dropped):
        return 0.0
    assert found.time is not None
    passes_s = sum(part.value for part in found.time.parts if part.name in _PASSES)
    slower = jitter.slowdown(job.num_data_ranks, dropped=strategy.num_dropped, every=job.compression.period)
    return passes_s * (float(slower) - 1)
