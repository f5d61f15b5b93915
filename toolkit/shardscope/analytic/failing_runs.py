"""Goodput of finite runs that fail and restart: for given failures, and as a distribution for random failures.

`reliability.expected` gives the mean over an endless run. A run that ends has few failures, so its goodput varies:

    run = FailingRun(work_s=48, interval_s=2, save_s=0.05, restart_s=0.8)
    duration_s([3.1, 9.7], run)                     with failures at these times
    simulated_s(run, mtbf_s=8, runs=10_000)         with random failures: one duration for each of 10,000 runs

The goodput is ``work_s`` divided by the duration. All times are in seconds; durations and times of failures count from
the beginning of the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from shardscope.analytic.large_batch.scaling import positive
from shardscope.analytic.reliability import Floats, not_negative
from shardscope.errors import SpecError

__all__ = [
    "FailingRun",
    "duration_s",
    "duration_with_progress_s",
    "simulated_s",
]

_ROUNDING = 1e-9
_MOST_FAILURES = 100_000
_NextFailure = Callable[[Floats, Floats], Floats | None]
"""Function that returns the time of each run's next failure, given the time at which it last started training and its
saved work; None if no run fails again."""


@dataclass(frozen=True)
class FailingRun:
    """Times that determine how long a run with failures takes, in seconds.

    Attributes:
        work_s: Time of all steps, above 0.
        interval_s: Time of the steps between two checkpoints; infinity if no checkpoint is saved.
        save_s: Time for which saving a checkpoint delays training.
        restart_s: Time from a failure to the first step after it.
        write_s: Additional time until a checkpoint that is written in the background is complete.

    Raises:
        SpecError: A time is negative, or `work_s` or `interval_s` is 0.
    """

    work_s: float
    interval_s: float
    save_s: float
    restart_s: float
    write_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check = positive if field.name in ("work_s", "interval_s") else not_negative
            check(field.name, getattr(self, field.name))

    def saves_in(self, seconds: Floats) -> Floats:
        """Return the number of checkpoints saved during `seconds` of training, counted from the last checkpoint."""
        return np.asarray(np.floor(seconds / self.interval_s + _ROUNDING))


def duration_s(failures_s: Sequence[float], run: FailingRun) -> float:
    """Return the duration of a run that fails at given times.

    A failure while the ranks restart makes them restart again; a failure after the end has no effect.

    Args:
        failures_s: Times of failures, in any order.
        run: The run.

    Example:
        >>> duration_s([5.0], FailingRun(work_s=10, interval_s=4, save_s=0, restart_s=1))
        12.0
    """
    left = iter(sorted(failures_s))
    return float(_durations(run, lambda _now, _saved: _column(next(left, None)), 1)[0])


def duration_with_progress_s(progress_s: Sequence[float], run: FailingRun) -> float:
    """Return the duration of a run that fails when it first reaches each given progress, as with a fault plan by step.

    Args:
        progress_s: Progress at each failure, as the time of the steps before it, not counting repeated steps; in any
            order.
        run: The run.

    Example:
        >>> duration_with_progress_s([5.0], FailingRun(work_s=10, interval_s=4, save_s=0.5, restart_s=1))
        13.0
    """
    left = iter(sorted(progress_s))

    def following(now: Floats, saved: Floats) -> Floats | None:
        place = _column(next(left, None))
        if place is None:
            return None
        steps_s = np.maximum(place - saved, 0.0)
        return np.asarray(now + steps_s + run.save_s * run.saves_in(steps_s))

    return float(_durations(run, following, 1)[0])


def simulated_s(run: FailingRun, *, mtbf_s: float, runs: int = 10_000, seed: int = 0) -> Floats:
    """Return the duration of each of many simulated runs with random, independent failures, in seconds.

    Args:
        run: The run.
        mtbf_s: Mean time between failures of the whole job.
        runs: Number of simulated runs.
        seed: Seed of the random numbers.

    Raises:
        SpecError: `mtbf_s` is not above 0, or so short that a run would have more than 100,000 failures.
    """
    mean, source = float(positive("mtbf_s", mtbf_s)), np.random.default_rng(seed)
    too_short = SpecError(
        f"mtbf_s={mtbf_s:g} is so short that the run would need more than {_MOST_FAILURES:,} failures to finish; "
        "give a longer one, or save checkpoints more often"
    )
    if _expected_failures(run, mean) > _MOST_FAILURES:
        raise too_short
    last, count = np.zeros(runs), 0

    def following(_now: Floats, _saved: Floats) -> Floats:
        nonlocal last, count
        count += 1
        if count > _MOST_FAILURES:  # the unluckiest of many runs has several times as many as expected
            raise too_short
        last = last + source.exponential(mean, runs)
        return last

    return _durations(run, following, runs)


def _expected_failures(run: FailingRun, mtbf_s: float) -> float:
    """Estimate the number of failures of a run, not counting failures during restarts; infinity if it overflows.

    On average, ``exp(t / mtbf_s) - 1`` failures occur before t seconds pass without a failure. Without checkpoints, t
    is the length of the run; with checkpoints, each interval between two of them is one such period, and the first
    checkpoint after a restart must also be written.
    """
    num_saves = float(run.saves_in(np.asarray(run.work_s)))
    with np.errstate(over="ignore"):
        whole = np.expm1((run.work_s + num_saves * run.save_s) / mtbf_s)
        if not num_saves:
            return float(whole)
        each = np.expm1((run.interval_s + run.save_s) / mtbf_s) * np.exp(run.write_s / mtbf_s)
        return float(min(whole, num_saves * each))


def _durations(run: FailingRun, following: _NextFailure, count: int) -> Floats:
    """Return the durations of `count` runs; `following` is called for their next failures until all runs have ended."""
    begun, saved, is_over = np.zeros(count), np.zeros(count), np.zeros(count, bool)
    while not is_over.all():
        failure = following(begun, saved)
        if failure is None:
            break
        is_over |= failure >= _end(run, begun, saved)
        complete = _complete_s(run, failure - begun)
        began_again = np.minimum(saved + complete, run.work_s)
        saved = np.where(is_over, saved, began_again)
        begun = np.where(is_over, begun, failure + run.restart_s)
    return _end(run, begun, saved)


def _complete_s(run: FailingRun, trained_s: Floats) -> Floats:
    """Return the work in complete checkpoints after `trained_s` of training and saving; 0 if the time is negative."""
    if run.interval_s == np.inf:
        return np.zeros_like(trained_s)
    cycles = (trained_s - run.write_s) / (run.interval_s + run.save_s)
    return np.asarray(np.floor(np.maximum(cycles, 0.0) + _ROUNDING) * run.interval_s)


def _end(run: FailingRun, begun: Floats, saved: Floats) -> Floats:
    left = run.work_s - saved
    return np.asarray(begun + left + run.save_s * run.saves_in(left))


def _column(value: float | None) -> Floats | None:
    return None if value is None else np.full(1, value)
