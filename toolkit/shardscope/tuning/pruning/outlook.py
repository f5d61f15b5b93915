"""Time, bytes and memory of a trial over all its steps, estimated from the steps that it has taken.

If every step sends the same and takes the same time (`is_steady`), the present pace is extrapolated. Other methods warm
up, average periodically, or change what they send, so their first steps do not represent the later ones. For these,
dominance, which must not prune a trial wrongly, counts the cost so far (`at_least`). Halving, which must rank all
trials, scales the measured cost by the formulas for each step's bytes (`expected`).
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from statistics import median

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication import stepwise_bytes
from shardscope.runlog.averages import WARM_UP_STEPS
from shardscope.spec import Compression, Job
from shardscope.spec.models import model_config
from shardscope.tuning.measured import Measured

_ANY_SIZE = 1_000_000
"""Assumed number of elements of a user-defined module; only ratios between the bytes of steps are used."""


def is_steady(compression: Compression) -> bool:
    """Return whether every step sends the same and takes the same time, so that some steps represent all.

    Example:
        >>> is_steady(Compression("topk")), is_steady(Compression("onebit-adam"))
        (True, False)
    """
    return compression.is_fixed and compression.carriage != "steps" and compression.steps_are_alike


def at_least(name: str, measured: Measured, job: Job) -> float | None:
    """Return a lower bound of ``seconds``, ``bytes`` or ``memory`` of the trial; None if it is not known yet."""
    if is_steady(job.compression):
        return measured.objective(name, job.steps)
    if name == "seconds" and measured.spent_s is not None:
        return measured.spent_s if measured.steps else None
    return measured.objective(name, min(measured.steps, job.steps))


def expected(name: str, measured: Measured, job: Job) -> float | None:
    """Return the expected ``seconds``, ``bytes`` or ``memory`` of the trial; None if nothing was measured yet."""
    is_told = name != "memory" and 0 < measured.steps < job.steps
    is_formula = not job.compression.steps_are_alike
    if not is_formula or not is_told:
        return measured.objective(name, job.steps)
    by_formula = _sent(job.compression, _size(job), job.world_size, job.steps)
    taken = by_formula[: measured.steps].sum()
    scale = measured.bytes / taken if taken else float(isinstance(job.model, str))
    if name == "bytes":
        return float(scale * by_formula.sum()) if scale else float(measured.bytes)
    return _seconds(measured, job, by_formula * scale)


def _seconds(measured: Measured, job: Job, sent: npt.NDArray[np.float64]) -> float | None:
    """Return the expected seconds: the pace so far, corrected on a link for the bytes of the remaining steps.

    Without a link the time per byte is unknown, and the pace is used as it is.
    """
    first = job.compression.at_step(1)
    is_gradual = first.is_on and first != job.compression
    if not is_gradual and measured.step_s is not None:  # each kind of step is weighted by how often it comes
        return measured.step_s * job.steps
    pace = measured.plain_s if measured.step_s is None else measured.step_s
    if pace is None or job.link is None:
        return None if pace is None else pace * job.steps
    counted = sent[: measured.steps]
    usual = median(counted[WARM_UP_STEPS:] if len(counted) > WARM_UP_STEPS else counted)
    more = (sent.sum() - usual * job.steps) / (job.world_size * job.link.bandwidth)
    return max(pace * job.steps + float(more), (measured.compute_s or 0.0) * job.steps)


def _size(job: Job) -> int:
    return model_config(job.model).num_params if isinstance(job.model, str) else _ANY_SIZE


@lru_cache(maxsize=256)
def _sent(compression: Compression, size: int, world_size: int, steps: int) -> npt.NDArray[np.float64]:
    """Return the bytes of all ranks in each step, for a model of `size` elements in one bucket; shape `(steps,)`."""
    shape: tuple[int, ...] = (size,)
    if compression.carriage == "layers":
        shape = (isqrt(size), isqrt(size))  # as one matrix, since only matrices have factors
    rank = compression.settings.get("rank")
    plan = None if rank is None else [int(rank)]  # the largest rank, as between two looks
    found = [
        int(stepwise_bytes(compression, [[shape]], world_size, step=step, steps=steps, plan=plan).sum())
        for step in range(1, steps + 1)
    ]
    return np.asarray(found, dtype=np.float64)
