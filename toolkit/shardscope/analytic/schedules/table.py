"""The table of a schedule, with the dependencies and activation memory that follow from its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from shardscope.analytic.schedules.timeline import DURATIONS, ScheduledOp, Timed, Timeline
from shardscope.errors import SpecError

__all__ = ["DURATIONS", "ScheduledOp", "ScheduleTable", "Timed", "Timeline"]


class Order(NamedTuple):
    """All operations in topological order; numbers are indices into `ScheduleTable.ops`."""

    sequence: tuple[int, ...]
    before: tuple[int, ...]
    """For each operation, the preceding operation on the same rank; -1 for the first."""
    needs: tuple[int, ...]
    """For each operation, the operation on a neighbouring stage whose result it needs; -1 if there is none."""


@dataclass(frozen=True)
class ScheduleTable:
    """The operations of every rank in order, and the rank of every stage."""

    ranks: tuple[tuple[ScheduledOp, ...], ...]
    stage_ranks: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return len(self.stage_ranks)

    @cached_property
    def ops(self) -> tuple[ScheduledOp, ...]:
        """All operations, rank by rank."""
        return tuple(op for row in self.ranks for op in row)

    def timeline(
        self,
        durations: Mapping[str, float] | None = None,
        *,
        stage_cost: Sequence[float] | None = None,
        send: float = 0.0,
    ) -> Timeline:
        """Schedule every operation as early as possible: after the previous one on its rank and after its dependencies.

        Args:
            durations: Duration of each kind of operation on one stage, in any unit of time; default `DURATIONS`.
                ``B`` may be omitted: it is then ``I`` plus ``W``.
            stage_cost: For each stage, the duration of its operations as a multiple of `durations`; default 1.
            send: Time from the end of an operation to the start of the one on another rank that needs its result, in
                the same unit. Sending does not block computing.

        Raises:
            SpecError: A duration is negative, or the numbers of costs and of stages differ.
            ValueError: The order deadlocks: each rank waits for another.

        Example:
            >>> build("1f1b", 2, 4).timeline({"F": 1, "B": 2}).end  # doctest: +SKIP
            15.0
        """
        costs = _costs(durations or DURATIONS, stage_cost, self.num_stages, send)
        return Timeline.of(self, [costs[op.op][op.stage] for op in self.ops], send)

    def timed(
        self,
        durations: Mapping[str, float] | None = None,
        *,
        stage_cost: Sequence[float] | None = None,
        send: float = 0.0,
    ) -> tuple[tuple[Timed, ...], ...]:
        """Return the rows of `timeline`: for each rank, all operations with their start and end."""
        return self.timeline(durations, stage_cost=stage_cost, send=send).rows

    @cached_property
    def order(self) -> Order:
        """A topological order of all operations.

        Raises:
            ValueError: The order deadlocks: each rank waits for another.
        """
        firsts = [0]
        for row in self.ranks:
            firsts.append(firsts[-1] + len(row))
        needs, feeds = self._links()
        sequence = _interleave(firsts, needs, feeds, [self.stage_ranks[op.stage] for op in self.ops])
        starts = set(firsts)
        before = tuple(-1 if i in starts else i - 1 for i in range(len(self.ops)))
        return Order(tuple(sequence), before, tuple(needs))

    def _links(self) -> tuple[list[int], list[int]]:
        """For each operation, its dependency on a neighbouring stage, and the operation that depends on it."""
        place = {(_result(op), op.stage, op.microbatch): i for i, op in enumerate(self.ops)}
        needs, feeds = [-1] * len(self.ops), [-1] * len(self.ops)
        for (kind, stage, batch), i in place.items():
            if kind == "W":
                self._require_earlier(place.get(("G", stage, batch)), i)
                continue
            if kind == "G":
                self._require_earlier(place.get(("F", stage, batch)), i)
            other = stage - 1 if kind == "F" else stage + 1
            if 0 <= other < self.num_stages:
                needs[i] = place.get((kind, other, batch), i)
                feeds[needs[i]] = i
        return needs, feeds

    @staticmethod
    def _require_earlier(earlier: int | None, later: int) -> None:
        """Raise an error unless operation `earlier` exists and comes before `later`, on the same rank."""
        if earlier is None or earlier > later:
            raise ValueError(DEADLOCK)

    @cached_property
    def bubble_fraction(self) -> float:
        """Fraction of all ranks' time, from the first operation to the last, that is idle.

        Uses the durations of `DURATIONS`. GPipe and 1F1B have (p-1) / (m+p-1) for p stages and m micro-batches (Huang
        et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2, state it as a share of the work, (p-1)/m).
        """
        return self.timeline().bubble_fraction

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Peak number of micro-batches whose activations each stage holds, by stage.

        The forward pass stores activations and the backward pass frees them; if it is split, the pass for the weights
        does.
        """
        held = [0] * self.num_stages
        peak = [0] * self.num_stages
        for op in self.ops:
            held[op.stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[op.op]
            peak[op.stage] = max(peak[op.stage], held[op.stage])
        return tuple(peak)

    def peak_activation(
        self, *, freed_by_input: float = 0.0, stage_sizes: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        """Peak activations of each rank, in units of one micro-batch's activations on a whole rank.

        Args:
            freed_by_input: Share of a stage's activations, 0 to 1, that the backward pass for the input already frees
                if the backward pass is split; the pass for the weights frees the rest.
            stage_sizes: Size of one micro-batch's activations on each stage, in any unit; None for 1/v on each of a
                rank's v stages.
        """
        steps = self.held(freed_by_input=freed_by_input, stage_sizes=stage_sizes)
        return tuple(max(held for _, held in row) for row in steps)

    def held(
        self, *, freed_by_input: float = 0.0, stage_sizes: Sequence[float] | None = None
    ) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Return, by rank, (index into `ops`, activations held while it runs) for each operation.

        Activations count from the start of their forward pass to the end of the pass that frees them. Arguments as
        for `peak_activation`.
        """
        if not 0 <= freed_by_input <= 1:
            raise SpecError(
                f"freed_by_input={freed_by_input}: a part of the activations lies between 0 and 1"
            )
        sizes = stage_sizes or [len(self.ranks) / self.num_stages] * self.num_stages
        change = {"F": 1.0, "B": -1.0, "I": -freed_by_input, "W": freed_by_input - 1.0}
        rows, first = [], 0
        for ops in self.ranks:
            rows.append(tuple(_running(ops, first, change, sizes)))
            first += len(ops)
        return tuple(rows)


DEADLOCK = "the schedule deadlocks: every rank waits for another"


def _result(op: ScheduledOp) -> str:
    """Kind of result of an operation; ``G`` is the gradient of a stage's input."""
    return "G" if op.op in "BI" else op.op


def _running(
    ops: Sequence[ScheduledOp], first: int, change: Mapping[str, float], sizes: Sequence[float]
) -> list[tuple[int, float]]:
    held, steps = 0.0, []
    for i, op in enumerate(ops, first):
        after = held + change[op.op] * sizes[op.stage]
        steps.append((i, max(after, held)))
        held = after
    return steps


def _interleave(
    firsts: Sequence[int], needs: Sequence[int], feeds: Sequence[int], rank_of: Sequence[int]
) -> list[int]:
    """Merge the ranks' orders: each rank runs until a dependency is missing, and resumes when that is done."""
    at, done, sequence = list(firsts[:-1]), bytearray(len(needs)), []
    ready = deque(range(len(at)))
    while ready:
        rank = ready.popleft()
        i, end = at[rank], firsts[rank + 1]
        while i < end and (needs[i] < 0 or done[needs[i]]):
            done[i] = 1
            sequence.append(i)
            fed = feeds[i]
            if fed >= 0 and fed == at[rank_of[fed]] and rank_of[fed] != rank:
                ready.append(rank_of[fed])
            i += 1
        at[rank] = i
    if len(sequence) < len(needs):
        raise ValueError(DEADLOCK)
    return sequence


def _costs(
    durations: Mapping[str, float], stage_cost: Sequence[float] | None, num_stages: int, send: float
) -> dict[str, list[float]]:
    """Duration of an operation, by kind and stage."""
    if stage_cost is not None and len(stage_cost) != num_stages:
        raise SpecError(
            f"stage_cost has {len(stage_cost)} numbers, but the pipeline has {num_stages} stages; give one for each"
        )
    whole = {"B": durations.get("I", 0.0) + durations.get("W", 0.0)} | dict(durations)
    uneven = [("stage_cost", cost) for cost in stage_cost] if stage_cost is not None else []
    for name, value in [*whole.items(), ("send", send), *uneven]:
        if not 0 <= value < inf:
            raise SpecError(f"{name}={value}: a time is a finite number of at least 0")
    return {
        kind: [value * cost for cost in stage_cost or [1.0] * num_stages] for kind, value in whole.items()
    }
