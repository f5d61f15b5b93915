"""Time, bytes and memory of a trial over all its steps, estimated from the steps that it has taken.

If all steps send the same bytes and take the same time (`is_steady`), the present pace is extrapolated. Other methods
warm up, average periodically, or change what they send, so their first steps do not represent the later ones. For these
methods there are two estimates. The dominance pruner must not prune a trial wrongly, so it counts only the cost so far
(`at_least`). Halving must rank all trials, so it scales the measured cost by the formulas for each step's bytes
(`expected`).
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from statistics import median

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication import stepwise_bytes
from shardscope.runlog.steps import WARM_UP_STEPS
from shardscope.spec import Compression, Job
from shardscope.spec.models import model_config
from shardscope.tuning.measured import TrialMetrics

_ANY_SIZE = 1_000_000
"""Assumed number of parameters of a user-defined model; only ratios between the bytes of steps are used."""


def is_steady(compression: Compression) -> bool:
    """Return whether all steps send the same bytes and take the same time, so that the first ones represent all.

    Example:
        >>> is_steady(Compression("topk")), is_steady(Compression("onebit-adam"))
        (True, False)
    """
    return compression.is_fixed and compression.carriage != "steps" and compression.steps_are_alike


def at_least(name: str, measured: TrialMetrics, job: Job) -> float | None:
    """Return a lower bound on ``seconds``, ``bytes`` or ``memory`` of the whole trial; None if not known yet."""
    if is_steady(job.compression):
        return measured.objective(name, job.steps)
    if name == "seconds" and measured.spent_s is not None:
        return measured.spent_s if measured.steps else None
    return measured.objective(name, min(measured.steps, job.steps))


def expected(name: str, measured: TrialMetrics, job: Job) -> float | None:
    """Return the expected ``seconds``, ``bytes`` or ``memory`` of the whole trial; None if nothing was measured yet."""
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


def _seconds(measured: TrialMetrics, job: Job, sent: npt.NDArray[np.float64]) -> float | None:
    """Return the expected training time of the trial, in seconds: its pace so far times its number of steps.

    If the job describes a link, the result is corrected for the bytes that the remaining steps send. Without a link the
    time per byte is unknown, and the pace is used unchanged.
    """
    first = job.compression.at_step(1)
    is_gradual = first.is_on and first != job.compression
    if not is_gradual and measured.step_s is not None:  # each kind of step is weighted by how often it occurs
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
    """Return the bytes that all ranks send in each step; shape `(steps,)`.

    The model is treated as one bucket of `size` elements.
    """
    shape: tuple[int, ...] = (size,)
    if compression.carriage == "layers":
        shape = (isqrt(size), isqrt(size))  # as one matrix, since only matrices can be factorised
    rank = compression.settings.get("rank")
    plan = None if rank is None else [int(rank)]  # the largest rank
    found = [
        int(stepwise_bytes(compression, [[shape]], world_size, step=step, steps=steps, plan=plan).sum())
        for step in range(1, steps + 1)
    ]
    return np.asarray(found, dtype=np.float64)
