"""Timeline of a schedule: start and end of each operation, and idle time of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardscope.analytic.schedules.table import ScheduleTable


class ScheduledOp(NamedTuple):
    """One operation of one stage on one micro-batch."""

    op: str
    """``F`` forward, ``B`` backward, ``I`` backward for the input only, ``W`` backward for the weights only."""
    stage: int
    microbatch: int


class Timed(NamedTuple):
    """An operation with its start and end, in the unit of the durations."""

    op: ScheduledOp
    start: float
    end: float


DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Textbook durations: a backward pass takes two forward passes, half for the input and half for the weights."""


@dataclass(frozen=True)
class Timeline:
    """Start and end of every operation of a table, in the order of `table.ops` and the unit of the durations."""

    table: ScheduleTable
    starts: Sequence[float]
    ends: Sequence[float]
    send: float = 0.0

    @classmethod
    def of(cls, table: ScheduleTable, costs: Sequence[float], send: float) -> Timeline:
        """Build the timeline in which every operation starts as early as possible, in one pass over the operations."""
        order, ranks = table.order, [table.stage_ranks[op.stage] for op in table.ops]
        starts, ends = (
            [0.0] * len(costs),
            [0.0] * (len(costs) + 1),
        )  # the last, index -1, stays 0: it stands for none
        before, needs = order.before, order.needs
        delays = [
            send if need >= 0 and ranks[need] != rank else 0.0
            for need, rank in zip(needs, ranks, strict=True)
        ]
        for i in order.sequence:
            free, there = ends[before[i]], ends[needs[i]] + delays[i]
            starts[i] = start = free if free > there else there  # noqa: FURB136  (half the time of max)
            ends[i] = start + costs[i]
        return cls(table, starts, ends[:-1], send)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First index and end index of each rank's operations in `ScheduleTable.ops`."""
        ends = list(accumulate(len(row) for row in self.table.ranks))
        return tuple(zip([0, *ends], ends, strict=False))

    @cached_property
    def rows(self) -> tuple[tuple[Timed, ...], ...]:
        """Operations with their times, by rank."""
        timed = list(map(Timed, self.table.ops, self.starts, self.ends))
        return tuple(tuple(timed[first:last]) for first, last in self.bounds)

    @cached_property
    def end(self) -> float:
        """End of the last operation; the first starts at 0."""
        return max(self.ends, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Computing time of each rank."""
        return tuple(sum(self.ends[a:b]) - sum(self.starts[a:b]) for a, b in self.bounds)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Idle time of each rank between its first and its last operation."""
        spans = [self.ends[b - 1] - self.starts[a] for a, b in self.bounds]
        return tuple(max(0.0, span - busy) for span, busy in zip(spans, self.busy, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Fraction of all ranks' time, from the first operation on any rank to the last on any rank, that is idle."""
        return 1 - sum(self.busy) / (self.end * len(self.bounds)) if self.end else 0.0

    @property
    def step_time(self) -> float:
        """Time of a step if ranks do not synchronise between steps: the longest span of any rank's operations.

        The zero-bubble papers count this (Qi et al. 2023, section 4: the optimizer is checked afterwards). If ranks
        synchronise at each step, as for clipping gradients, the time is `end`.
        """
        return max(self.ends[b - 1] - self.starts[a] for a, b in self.bounds)
