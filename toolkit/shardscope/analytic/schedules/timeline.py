"""A schedule laid out in time: when each operation runs, who waits how long, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardscope.analytic.schedules.table import Table


class Op(NamedTuple):
    """One operation of one stage on one micro-batch."""

    op: str
    """``F`` forward, ``B`` backward, ``I`` backward for the input only, ``W`` backward for the weights only."""
    stage: int
    microbatch: int


class Timed(NamedTuple):
    """An operation with its place in time, in the unit of the durations."""

    op: Op
    start: float
    end: float


DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""The textbook's: a backward pass takes two forward passes, half for the input and half for the weights."""


@dataclass(frozen=True)
class Timeline:
    """Start and end of every operation of a table, as in `Table.ops`, in the unit of the durations."""

    table: Table
    starts: Sequence[float]
    ends: Sequence[float]
    send: float = 0.0

    @classmethod
    def of(cls, table: Table, costs: Sequence[float], send: float) -> Timeline:
        """Everything as early as it can be, one pass over the operations."""
        order, ranks = table.order, [table.stage_ranks[op.stage] for op in table.ops]
        starts, ends = [0.0] * len(costs), [0.0] * (len(costs) + 1)  # the last stays 0: it stands for none
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
        """By rank, where its operations begin and end in `Table.ops`."""
        ends = list(accumulate(len(row) for row in self.table.ranks))
        return tuple(zip([0, *ends], ends, strict=False))

    @cached_property
    def rows(self) -> tuple[tuple[Timed, ...], ...]:
        """By rank, its operations with their times."""
        timed = list(map(Timed, self.table.ops, self.starts, self.ends))
        return tuple(tuple(timed[first:last]) for first, last in self.bounds)

    @cached_property
    def end(self) -> float:
        """When the last operation is over; the first begins at 0."""
        return max(self.ends, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """By rank, the time in which it computes."""
        return tuple(sum(self.ends[a:b]) - sum(self.starts[a:b]) for a, b in self.bounds)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """By rank, the time in which it waits between its own first operation and its own last."""
        spans = [self.ends[b - 1] - self.starts[a] for a, b in self.bounds]
        return tuple(max(0.0, span - busy) for span, busy in zip(spans, self.busy, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time, from the first operation of any to the last of any, in which they wait."""
        return 1 - sum(self.busy) / (self.end * len(self.bounds)) if self.end else 0.0

    @property
    def step_time(self) -> float:
        """From one step to the next where no rank waits for the others in between: the longest of the ranks' spans.

        The zero-bubble papers count so (Qi et al. 2023, section 4: the optimizer is checked afterwards). Where ranks
        meet at each step, as for clipping gradients, it is `end`.
        """
        return max(self.ends[b - 1] - self.starts[a] for a, b in self.bounds)
