"""The finished steps of a run, stored in columns of about 140 bytes per step so that long runs fit in memory.

In most jobs all steps are alike, so their mean or median is representative. Some jobs have several kinds of steps: with
local SGD, only every `period`-th step communicates with the other ranks, and some compressors send the gradients of the
first steps uncompressed. A median over all steps would reflect only the most frequent kind. So `per_step` averages each
kind separately, and weights it by its frequency in the run, no matter which steps were recorded.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shardscope.runlog.schema import Event
    from shardscope.spec import Job


class Step(NamedTuple):
    """One step that all ranks have finished.

    Attributes:
        number: Number of the step, from 1.
        t: Time at which the last rank whose gradient was used finished the step, in Unix seconds.
        loss: Mean loss over the ranks that computed a loss; NaN if none did.
        step_time_s: Duration of the step on the slowest rank, in seconds, without ranks whose gradient was
            dropped; see `waited_once_s` for ranks that synchronise only in some steps, and `together_s` for
            asynchronous workers.
        samples: Number of samples processed by all ranks together.
        tokens: Number of tokens processed by all ranks together; 0 if the model does not read tokens.
        lr: Learning rate on the ranks that computed a loss.
        grad_norm: Largest gradient norm on any rank; NaN if not computed.
        sent_bytes: Training bytes sent by all ranks together, including late traffic of servers.
        messages: Training messages sent by all ranks together.
        memory_bytes: Memory used at the end of the step, in bytes, on the rank that used most.
        peak_memory_bytes: Peak memory from the start of the run to this step, in bytes, on the rank with the highest
            peak.
        codec_s: Time spent packing and unpacking, in seconds, on the rank that spent most; 0 without compression.
        compute_s: Compute time, in seconds, on the rank that spent most; NaN unless all ranks recorded spans.
        late_s: Time by which computation took longer than on the emulated processor, in seconds, on the rank that was
            latest; 0 if none is emulated.
        skipped: 1 if any rank skipped its update, for example after an overflow; otherwise 0.
        world_size: Number of ranks that took the step.
    """

    number: int
    t: float = 0.0
    loss: float = math.nan
    step_time_s: float = 0.0
    samples: int = 0
    tokens: int = 0
    lr: float = math.nan
    grad_norm: float = math.nan
    sent_bytes: int = 0
    messages: int = 0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    codec_s: float = 0.0
    compute_s: float = math.nan
    skipped: int = 0
    late_s: float = 0.0
    world_size: int = 0

    @property
    def samples_per_s(self) -> float:
        """Samples processed by all ranks per second."""
        return self.samples / self.step_time_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens processed by all ranks per second; None if the model does not read tokens."""
        return self.tokens / self.step_time_s if self.tokens else None


_CODES = "".join("d" if isinstance(Step._field_defaults.get(name), float) else "q" for name in Step._fields)
MOST = 2**62
"""Largest count in a column; a larger count, as a damaged log may report, is reduced to this value."""
_RATES = {"samples_per_s": "samples", "tokens_per_s": "tokens"}


class Steps:
    """A sequence of `Step`, ordered by step number, to which new steps are appended.

    Example:
        >>> steps = Steps([Step(1, loss=2.3, step_time_s=0.1, samples=32)])
        >>> steps[-1].loss, steps[-1].samples_per_s, len(steps)
        (2.3, 320.0, 1)
    """

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._columns: tuple[array[Any], ...] = tuple(map(array, _CODES))
        for step in steps:
            self.append(step)

    def append(self, step: Step) -> None:
        """Append a step, after removing steps with the same or a higher number, which a restarted run repeats."""
        while self and self._columns[0][-1] >= step.number:
            for column in self._columns:
                column.pop()
        for column, value in zip(self._columns, step, strict=True):
            column.append(value)

    def truncate(self, last: int) -> int:
        """Remove the steps after step `last`, which a restarted run repeats, and return their number."""
        keep = bisect_right(self._columns[0], last)
        removed = len(self) - keep
        for column in self._columns:
            del column[keep:]
        return removed

    def column(self, name: str, every: int = 1) -> array[Any]:
        """Return a copy of a column: a field of `Step` or a rate (``samples_per_s``), at every `every`-th step."""
        if name in _RATES:
            amounts, seconds = self.column(_RATES[name], every), self.column("step_time_s", every)
            return array("d", (amount / each for amount, each in zip(amounts, seconds, strict=True)))
        return self._columns[Step._fields.index(name)][::every]

    def since_resize(self) -> int:
        """Return the index of the first step since the number of ranks last changed."""
        sizes = np.asarray(self._columns[Step._fields.index("world_size")])
        others = np.flatnonzero(sizes != sizes[-1]) if len(sizes) else sizes
        return int(others[-1]) + 1 if len(others) else 0

    @property
    def is_resized(self) -> bool:
        """Whether the newest step was taken by a different number of ranks than the previous step."""
        sizes = self._columns[Step._fields.index("world_size")]
        return len(sizes) > 1 and sizes[-1] != sizes[-2]

    def add_traffic(self, number: int, sent_bytes: int, messages: int) -> None:
        """Add traffic that was sent for step `number` after that step finished; ignored if there is no such step."""
        index = bisect_left(self._columns[0], number)
        if index < len(self) and self._columns[0][index] == number:
            for name, more in (("sent_bytes", sent_bytes), ("messages", messages)):
                column = self._columns[Step._fields.index(name)]
                column[index] = min(column[index] + more, MOST)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[Step]:
        return map(Step._make, zip(*self._columns, strict=True))

    def __getitem__(self, index: int) -> Step:
        return Step._make(column[index] for column in self._columns)


WARM_UP_STEPS = 2
"""Number of initial steps of each kind left out of averages, because they also build buckets and allocate memory."""

Average = Literal["mean", "median"]
"""Average over steps of the same kind: mean for additive quantities such as bytes, median for times with outliers."""
Floats = npt.NDArray[np.float64]


class StepEnd(NamedTuple):
    """End of a step, over the ranks whose gradients it waited for."""

    t: float
    """Time at which the last of these ranks finished the step, in Unix seconds."""
    step_time_s: float
    """Duration of the step on the slowest of these ranks, in seconds."""


def step_end(row: Sequence[Event]) -> StepEnd:
    """Return when a step ended, from the events of its ranks; ranks whose gradient was dropped do not count."""
    awaited = [event for event in row if not event.get("dropped")] or row
    return StepEnd(max(event["t"] for event in awaited), max(event["step_time_s"] for event in awaited))


def together_s(row: Sequence[Event]) -> float:
    """Return the time in which all asynchronous workers together compute as many gradients as a step has, in seconds.

    If workers share the gradients of a step, each computes all the time, so this is the mean of the workers' times. If
    each worker computes one gradient per step, at its own speed, it is the number of workers divided by the sum of
    their rates.

    Args:
        row: Events of the step, of all ranks.
    """
    workers = [event for event in row if "gradients" in event] or [event for event in row if event["samples"]]
    seconds = [float(event["step_time_s"]) for event in workers]
    if not workers or min(seconds) <= 0:
        return step_end(row).step_time_s
    if "gradients" in workers[0]:
        return sum(seconds) / len(seconds)
    return len(seconds) / sum(1 / each for each in seconds)


def waited_once_s(step_time_s: float, ended: float, before_ended: float | None) -> float:
    """Return the duration of a step that ranks need not begin at the same time, in seconds.

    If ranks synchronise only in some steps, as with local SGD, a slow rank takes long in its local steps, and
    the other ranks then wait for it in the step in which they synchronise. The longest time of any rank would
    count that time twice. A step's duration is therefore at most the time since all ranks had finished the
    previous step.

    Args:
        step_time_s: Longest time of any rank, in seconds.
        ended: When the last rank finished the step, in Unix seconds.
        before_ended: When the last rank finished the previous step; None if that is unknown.
    """
    since = 0.0 if before_ended is None else ended - before_ended
    return min(step_time_s, since) if since > 0 else step_time_s


class StepKinds(NamedTuple):
    """The kinds of steps in a job.

    Attributes:
        period: Interval between steps that communicate (local SGD), in steps; 1 if every step communicates.
        uncompressed: Number of steps at the start of the job whose gradients are sent uncompressed.
    """

    period: int = 1
    uncompressed: int = 0

    @classmethod
    def of(cls, job: Job) -> StepKinds:
        """Return the kinds of steps of a job."""
        return cls(job.compression.period, job.compression.uncompressed(job.steps))


ALIKE = StepKinds()


def per_step(
    steps: npt.ArrayLike,
    values: npt.ArrayLike,
    kinds: StepKinds = ALIKE,
    *,
    average: Average = "mean",
    until: int | None = None,
) -> float | None:
    """Return the average of a quantity per step, over all steps from the first of `steps` to `until`.

    Args:
        steps: Step numbers of the finished steps, in ascending order; the first step of a job is 1.
        values: The quantity at each finished step; NaN where it is unknown.
        kinds: The kinds of steps in the job, whose averages are weighted by the number of steps of each kind.
        average: How steps of the same kind are averaged.
        until: Last step to count for these weights, such as the last step of a job that is still running; None means
            the last of `steps`.

    Returns:
        The average; None if no value is known, or if one of the kinds that occur has no known value yet.

    Example:
        >>> per_step([1, 2, 3, 4, 5, 6, 7], [9, 9, 0, 80, 0, 0, 0], StepKinds(period=4))
        20.0
    """
    numbers, figures = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    if not len(numbers):
        return None
    begin, end = int(numbers[0]), int(numbers[-1]) if until is None else until
    border = min(max(kinds.uncompressed + 1, begin), end + 1)  # first step after the uncompressed ones
    is_known, is_first = ~np.isnan(figures), numbers < border
    shares = ((border - begin, is_known & is_first), (end + 1 - border, is_known & ~is_first))
    found = [
        (count, _average_over_periods(numbers[chosen], figures[chosen], kinds.period, average))
        for count, chosen in shares
        if count
    ]
    known = [(count, mean) for count, mean in found if mean is not None]
    if len(known) < len(found):
        return None
    return known[0][1] if len(known) == 1 else sum(count * mean for count, mean in known) / (end + 1 - begin)


def _average_over_periods(
    numbers: npt.NDArray[np.int64], figures: Floats, period: int, average: Average
) -> float | None:
    """Return the average per step over whole periods, without warm-up if possible; None until a period has ended."""
    mean = np.mean if average == "mean" else np.median
    for first in (WARM_UP_STEPS, 0):
        if period == 1 and len(figures) > first:
            return float(mean(figures[first:]))
        is_last = numbers[first:] % period == 0
        last, others = figures[first:][is_last], figures[first:][~is_last]
        if len(last) and len(others):
            return float((mean(last) + (period - 1) * mean(others)) / period)
    return None
