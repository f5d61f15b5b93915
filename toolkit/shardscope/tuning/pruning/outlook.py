"""Outlook of a running trial from the steps it has taken: its final quality, and its total time, bytes and memory.

Final quality is bounded by the curves of finished trials. A curve is a sequence of points (fraction of the samples
seen, quality); lower quality values are better, and the last point is at fraction 1. Trials with different batch sizes
take different numbers of steps but see the same samples, so their curves can be compared.

Time, bytes and memory over all steps are estimated from the steps taken. If all steps send the same bytes and take the
same time (`is_steady`), the current pace is extrapolated. Other methods warm up, average periodically, or change what
they send, so their first steps do not represent their later steps. For these methods there are two estimates. The
dominance pruner must not prune a trial wrongly, so it counts only the cost so far (`at_least`). Halving must rank all
trials, so it scales the measured cost by the formulas for each step's bytes (`expected`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import isqrt
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication import stepwise_bytes
from shardscope.runlog.steps import WARM_UP_STEPS
from shardscope.spec import Compression, Job
from shardscope.spec.models import model_config
from shardscope.tuning.measured import TrialMetrics

Point = tuple[float, float]
_COLUMNS = {"loss": 1, "error": 2}


class Improvement(NamedTuple):
    """Largest improvement of any finished trial between a given fraction of its samples and its end."""

    gain: float
    """Largest difference between the quality at that fraction and the final quality, at least 0."""
    factor: float
    """Smallest ratio of the final quality to the quality at that fraction, at most 1."""
    num_trials: int
    """Number of trials that were compared."""

    def best_end(self, quality: float, *, caution: float = 1.0) -> float:
        """Return an optimistic final quality for a trial whose current quality is `quality`.

        The trial is assumed to improve `caution` times as much as the best finished trial did, both as a difference
        and as a ratio. The result is the higher of the two values: at a high loss the difference is the tighter bound,
        at a low loss the ratio.

        Example:
            >>> Improvement(gain=1.0, factor=0.5, num_trials=4).best_end(0.6)
            0.3
            >>> Improvement(gain=1.0, factor=0.5, num_trials=4).best_end(0.6, caution=2)
            0.15
        """
        if quality <= 0:
            return quality - self.gain * caution
        return max(quality - self.gain * caution, quality * self.factor / caution)


def curve_of(measured: TrialMetrics, objective: str, steps: int) -> list[Point]:
    """Return the curve of a run for ``loss`` or ``error``, without points that are not finite.

    Args:
        measured: Metrics of the run.
        objective: ``loss`` or ``error``.
        steps: Number of steps of the whole run.
    """
    points = [(row[0] / steps, row[_COLUMNS[objective]]) for row in measured.curve]
    return [(share, quality) for share, quality in points if math.isfinite(quality)]


def at(curve: Sequence[Point], share: float) -> float | None:
    """Return the quality at the last evaluation up to the fraction `share` of the samples; None if there was none.

    Example:
        >>> at([(0.25, 2.0), (0.5, 1.5), (1.0, 1.0)], 0.6)
        1.5
    """
    reached = [quality for point, quality in curve if point <= share + 1e-9]
    return reached[-1] if reached else None


def improvement(finished: Iterable[Sequence[Point]], share: float) -> Improvement:
    """Return the largest improvement of any curve from the fraction `share` of its samples to its end.

    Curves without an evaluation up to `share` and curves of unfinished trials are left out.

    Example:
        >>> improvement([[(0.5, 2.0), (1.0, 1.0)], [(0.5, 0.4), (1.0, 0.1)]], 0.5)
        Improvement(gain=1.0, factor=0.25, num_trials=2)
    """
    ends = [
        (here, curve[-1][1])
        for curve in finished
        if curve and curve[-1][0] >= 1 - 1e-9 and (here := at(curve, share)) is not None
    ]
    gain = max((here - end for here, end in ends), default=0.0)
    factor = min((end / here for here, end in ends if here > 0), default=1.0)
    return Improvement(max(gain, 0.0), min(factor, 1.0), len(ends))


_ANY_SIZE = 1_000_000
"""Assumed number of parameters of a user-defined model; only ratios between the bytes of steps are used."""


def is_steady(compression: Compression) -> bool:
    """Return whether all steps send the same bytes and take the same time, so that the first steps represent all.

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
