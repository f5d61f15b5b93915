"""The typical step in a log that several ranks wrote, or of a job that was started several times."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from shardscope.errors import DataError
from shardscope.spec.units import plural

WARM_UP = 2
"""Number of logged steps left out after each start, in which kernels are compiled and buffers allocated."""

APART = 1.2
"""Ratio of two times of the same step above which they belong to different runs."""


class Step(NamedTuple):
    """Content of one line about a step."""

    number: int
    value: float
    rank: str = ""
    start: int = 0
    """Number of starts of the job reported earlier in the log."""
    batch: int | None = None
    """Number of sequences in the step, if the line contains it."""


def sessions_of(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the steps of each uninterrupted stretch of training, in which each rank counts upward."""
    groups: dict[tuple[str, int], list[Step]] = {}
    for step in steps:
        groups.setdefault((step.rank, step.start), []).append(step)
    return [session for group in groups.values() for session in _stretches(group)]


def _stretches(steps: Sequence[Step]) -> list[list[Step]]:
    """Split unlabelled lines where counting starts again.

    Each line is assigned to the counter with the closest lower step, and counters only go up. If several
    ranks write to one file, their counters run in parallel; the counters of a restarted job follow each
    other.
    """
    ahead: list[tuple[int, int]] = []  # last number and place of each counter
    first: dict[int, int] = {}  # the place where a counter began, by its last place
    for place, step in enumerate(steps):
        before = bisect_left(ahead, (step.number, -1)) - 1
        began = first.pop(ahead.pop(before)[1]) if before >= 0 else place
        insort(ahead, (step.number, place))
        first[place] = began
    found: list[list[Step]] = []
    end = -1
    for last, began in sorted(first.items(), key=lambda each: each[1]):
        if began > end and (end < 0 or steps[began].number < steps[end].number):
            found.append([])
        found[-1] += steps[end + 1 : last + 1]
        end = max(end, last)
    return found


def typical(sessions: Sequence[Sequence[Step]], name: str, what: str = "") -> float:
    """Return the median over the steps of sessions, without the warm-up of each.

    Args:
        sessions: Steps of each stretch of training.
        name: Name of the log, for messages.
        what: Description of the steps for messages, such as `` with a batch of 512``.

    Raises:
        DataError: No session has more logged steps than its warm-up.
    """
    kept: list[float] = []
    most = 0
    for session in sessions:
        logged = sorted({step.number for step in session})
        most = max(most, len(logged))
        warm = set(logged[WARM_UP:])
        kept += [step.value for step in session if step.number in warm]
    if not kept:
        raise DataError(
            f"rows={name!r} has {plural(most, 'logged step')}{what}, and the first {WARM_UP} are left "
            f"out as warm-up; give a log of at least {WARM_UP + 1}"
        )
    return median(kept)
