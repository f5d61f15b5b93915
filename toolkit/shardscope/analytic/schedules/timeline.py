"""Timeline of a pipeline schedule: start and end of each operation, and busy and idle time of each rank."""

from __future__ import annotations

import math
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
    """``F``: forward pass; ``B``: backward pass; ``I``, ``W``: input and weight gradients of a split backward pass."""
    stage: int
    microbatch: int


class Timed(NamedTuple):
    """An operation with its start and end, in the unit of the durations."""

    op: ScheduledOp
    start: float
    end: float


DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Textbook durations: a backward pass takes as long as two forward passes, half of it for the input gradient."""


@dataclass(frozen=True)
class Timeline:
    """Start and end of every operation in a table.

    Attributes:
        table: The table of the schedule.
        starts: Start of each operation in `table.ops`, in the unit of the durations.
        ends: End of each operation in `table.ops`, in the same unit.
        send: Time to send a result to another rank, in the same unit.
    """

    table: ScheduleTable
    starts: Sequence[float]
    ends: Sequence[float]
    send: float = 0.0

    @classmethod
    def of(cls, table: ScheduleTable, costs: Sequence[float], send: float) -> Timeline:
        """Build the timeline in which every operation starts as early as possible.

        Args:
            table: The table of the schedule.
            costs: Duration of each operation in `table.ops`.
            send: Time to send a result to another rank, in the same unit.
        """
        order, ranks = table.order, [table.stage_ranks[op.stage] for op in table.ops]
        starts, ends = (
            [0.0] * len(costs),
            [0.0] * (len(costs) + 1),
        )  # one more: index -1, used if there is no earlier operation, reads the last element, which stays 0
        before, needs = order.before, order.needs
        delays = [
            send if need >= 0 and ranks[need] != rank else 0.0
            for need, rank in zip(needs, ranks, strict=True)
        ]
        for i in order.sequence:
            free, there = ends[before[i]], ends[needs[i]] + delays[i]
            starts[i] = start = free if free > there else there  # noqa: FURB136  (twice as fast as max)
            ends[i] = start + costs[i]
        return cls(table, starts, ends[:-1], send)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For each rank, the first index and the end index (exclusive) of its operations in `ScheduleTable.ops`."""
        ends = list(accumulate(len(row) for row in self.table.ranks))
        return tuple(zip([0, *ends], ends, strict=False))

    @cached_property
    def rows(self) -> tuple[tuple[Timed, ...], ...]:
        """The operations of each rank, with their start and end."""
        timed = list(map(Timed, self.table.ops, self.starts, self.ends))
        return tuple(tuple(timed[first:last]) for first, last in self.bounds)

    @cached_property
    def end(self) -> float:
        """End of the last operation; the first operation starts at 0."""
        return max(self.ends, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank spends on operations."""
        return tuple(sum(self.ends[a:b]) - sum(self.starts[a:b]) for a, b in self.bounds)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Idle time of each rank between its first and its last operation."""
        spans = [self.ends[b - 1] - self.starts[a] for a, b in self.bounds]
        return tuple(max(0.0, span - busy) for span, busy in zip(spans, self.busy, strict=True))

    def own_path(self, rank: int) -> float:
        """Return the duration of the longest chain of dependent operations from a rank's first operation to its last.

        It is at most the time between these two operations, because the last operation may also wait for operations
        that do not depend on the first. Unlike that time, it never increases if operations get shorter.
        """
        first, end = self.bounds[rank]
        order, ranks = self.table.order, [self.table.stage_ranks[op.stage] for op in self.table.ops]
        reached = [-math.inf] * (len(self.ends) + 1)  # index -1 stands for no earlier operation
        for i in order.sequence:
            need = order.needs[i]
            there = reached[need] + (self.send if need >= 0 and ranks[need] != ranks[i] else 0.0)
            start = 0.0 if i == first else max(reached[order.before[i]], there)
            reached[i] = start + self.ends[i] - self.starts[i]
        return reached[end - 1]

    @property
    def longest_own_path(self) -> float:
        """The longest `own_path` of any rank."""
        spans = [self.ends[b - 1] - self.starts[a] for a, b in self.bounds]
        longest = 0.0
        for rank in sorted(range(len(spans)), key=lambda rank: -spans[rank]):
            if spans[rank] <= longest:
                break  # no later rank has a longer path
            longest = max(longest, self.own_path(rank))
        return longest

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the time from the first to the last operation in which a rank is idle, averaged over ranks."""
        return 1 - sum(self.busy) / (self.end * len(self.bounds)) if self.end else 0.0

    @property
    def step_time(self) -> float:
        """Step time if ranks do not synchronise between steps: the longest span of one rank's operations.

        The zero-bubble papers use this definition (Qi et al. 2023, section 4: the update is validated afterwards). If
        ranks synchronise in every step, as for clipping gradients, the step time is `end`.
        """
        return max(self.ends[b - 1] - self.starts[a] for a, b in self.bounds)
