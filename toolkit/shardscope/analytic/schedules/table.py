"""The table of a pipeline schedule: each rank's operations in order, their dependencies, and activation memory."""

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


_HELD = {"F": 1, "B": -1, "W": -1, "I": 0}
"""By how many micro-batches an operation changes what its stage holds."""


class Order(NamedTuple):
    """Topological order and dependencies of all operations, as indices into `ScheduleTable.ops`."""

    sequence: tuple[int, ...]
    """All operations, each after the operations that it depends on."""
    before: tuple[int, ...]
    """For each operation, the previous operation on the same rank; -1 for the first."""
    needs: tuple[int, ...]
    """For each operation, the operation on a neighbouring stage whose result it needs; -1 if it needs none."""


@dataclass(frozen=True)
class ScheduleTable:
    """Table of a pipeline schedule.

    Attributes:
        ranks: The operations of each rank, in order.
        stage_ranks: The rank that holds each stage.
        blocks: Whether ranks wait for their messages; see `PipelineSchedule.blocks`.
    """

    ranks: tuple[tuple[ScheduledOp, ...], ...]
    stage_ranks: tuple[int, ...]
    blocks: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages in the whole pipeline."""
        return len(self.stage_ranks)

    @cached_property
    def ops(self) -> tuple[ScheduledOp, ...]:
        """The operations of all ranks, concatenated rank by rank."""
        return tuple(op for row in self.ranks for op in row)

    def timeline(
        self,
        durations: Mapping[str, float] | None = None,
        *,
        stage_cost: Sequence[float] | None = None,
        send: float = 0.0,
    ) -> Timeline:
        """Return the start and end of every operation, each started as early as the order and its dependencies allow.

        Args:
            durations: Duration on one stage of each operation, ``F``, ``B``, ``I`` and ``W``, in any unit of time;
                default `DURATIONS`. ``B`` may be omitted: it is then ``I`` plus ``W``.
            stage_cost: For each stage, a factor that multiplies the durations of its operations; default 1.
            send: Time to send a result to another rank, in the same unit as the durations. Sending overlaps with
                computation.

        Raises:
            SpecError: A duration is negative or not finite, `stage_cost` does not have one number per stage, or the
                order deadlocks.

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
        """Return, for each rank, its operations with their start and end; the arguments are the same as for
        `timeline`.
        """
        return self.timeline(durations, stage_cost=stage_cost, send=send).rows

    @cached_property
    def order(self) -> Order:
        """A topological order of all operations, with their dependencies.

        Raises:
            SpecError: The schedule deadlocks, so there is no topological order.
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
        """Return two lists: the operation on a neighbouring stage that each operation needs, and its reverse.

        The reverse gives the operation that needs each operation. Operations are indices into `ops`; -1 for none.
        """
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
        """Check that operation `earlier` exists and precedes operation `later` on the same rank.

        Raises:
            SpecError: The operation is missing or runs later.
        """
        if earlier is None or earlier > later:
            raise SpecError(DEADLOCK)

    @cached_property
    def bubble_fraction(self) -> float:
        """Fraction of the step, averaged over ranks, in which a rank is idle; for the durations in `DURATIONS`.

        For GPipe and 1F1B it is (p-1) / (m+p-1) with p stages and m micro-batches (Huang et al. 2019, section 2.3).
        Narayanan et al. 2021, section 2.2, instead give idle time as a fraction of the work, (p-1)/m.
        """
        return self.timeline().bubble_fraction

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Peak number of micro-batches whose activations each stage holds, by stage.

        A forward pass stores activations, and the backward pass frees them; if the backward pass is split, they are
        freed after the weight gradients.
        """
        held = [0] * self.num_stages
        peak = [0] * self.num_stages
        for op in self.ops:
            held[op.stage] += _HELD[op.op]
            peak[op.stage] = max(peak[op.stage], held[op.stage])
        return tuple(peak)

    def held_together(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return how many micro-batches the stages of a rank hold at the same time, for each rank.

        Each rank has one or more combinations, with a number for each of its stages in stage order; combinations that
        another one equals or exceeds on every stage are left out. So the peak activations of a rank are the maximum
        over its combinations, for any sizes of stages.
        """
        return tuple(self._combinations(rank, row) for rank, row in enumerate(self.ranks))

    def _combinations(self, rank: int, row: Sequence[ScheduledOp]) -> tuple[tuple[int, ...], ...]:
        stages = [stage for stage, at in enumerate(self.stage_ranks) if at == rank]
        held, seen = dict.fromkeys(stages, 0), set()
        for op in row:
            held[op.stage] += _HELD[op.op]
            seen.add(tuple(held.values()))
        largest = [
            one
            for one in seen
            if not any(
                other != one and all(a <= b for a, b in zip(one, other, strict=True)) for other in seen
            )
        ]
        return tuple(sorted(largest))

    def peak_activation(
        self, *, freed_by_input: float = 0.0, stage_sizes: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        """Return the peak activations of each rank, by default in units of one micro-batch on all stages of a rank.

        Args:
            freed_by_input: Fraction of a stage's activations, 0 to 1, that is freed after the input gradient if the
                backward pass is split. The remaining activations are freed after the weight gradients.
            stage_sizes: Size of one micro-batch's activations on each stage, in any unit, which is then the unit of the
                result; None for 1/v on each of a rank's v stages.
        """
        steps = self.held(freed_by_input=freed_by_input, stage_sizes=stage_sizes)
        return tuple(max(held for _, held in row) for row in steps)

    def held(
        self, *, freed_by_input: float = 0.0, stage_sizes: Sequence[float] | None = None
    ) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Return the activations that each rank holds while each of its operations runs.

        The result has one tuple per rank, with a pair for each operation: the operation's index into `ops`, and the
        activations held. They are held from the start of the forward pass to the end of the pass that frees them. The
        arguments and the unit are those of `peak_activation`.

        Raises:
            SpecError: `freed_by_input` is not between 0 and 1.
        """
        if not 0 <= freed_by_input <= 1:
            raise SpecError(
                f"freed_by_input={freed_by_input} is not a fraction of the activations; give a number from 0 to 1"
            )
        sizes = stage_sizes or [len(self.ranks) / self.num_stages] * self.num_stages
        change = {"F": 1.0, "B": -1.0, "I": -freed_by_input, "W": freed_by_input - 1.0}
        rows, first = [], 0
        for ops in self.ranks:
            rows.append(tuple(_running(ops, first, change, sizes)))
            first += len(ops)
        return tuple(rows)


DEADLOCK = "the schedule deadlocks (no rank can run its next operation)"


def _result(op: ScheduledOp) -> str:
    """Return what an operation produces: ``F`` outputs, ``G`` input gradients (by B or I), ``W`` weight gradients."""
    return "G" if op.op in "BI" else op.op


def _running(
    ops: Sequence[ScheduledOp], first: int, change: Mapping[str, float], sizes: Sequence[float]
) -> list[tuple[int, float]]:
    """Return the rows of `ScheduleTable.held` for one rank, whose operations have indices from `first`."""
    held, steps = 0.0, []
    for i, op in enumerate(ops, first):
        after = held + change[op.op] * sizes[op.stage]
        steps.append((i, max(after, held)))
        held = after
    return steps


def _interleave(
    firsts: Sequence[int], needs: Sequence[int], feeds: Sequence[int], rank_of: Sequence[int]
) -> list[int]:
    """Merge the orders of all ranks into a topological order.

    Each rank runs its operations until one lacks a dependency, and continues when this dependency has run.
    """
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
        raise SpecError(DEADLOCK)
    return sequence


def _costs(
    durations: Mapping[str, float], stage_cost: Sequence[float] | None, num_stages: int, send: float
) -> dict[str, list[float]]:
    """Return the duration of each operation on each stage, by operation (``F``, ``B``, ``I`` and ``W``)."""
    if stage_cost is not None and len(stage_cost) != num_stages:
        raise SpecError(
            f"stage_cost has length {len(stage_cost)}, but the pipeline has {num_stages} stages; give one per stage"
        )
    whole = {"B": durations.get("I", 0.0) + durations.get("W", 0.0)} | dict(durations)
    uneven = [("stage_cost", cost) for cost in stage_cost] if stage_cost is not None else []
    for name, value in [*whole.items(), ("send", send), *uneven]:
        if not 0 <= value < inf:
            raise SpecError(f"{name}={value} is negative or not finite; give a finite number of at least 0")
    return {
        kind: [value * cost for cost in stage_cost or [1.0] * num_stages] for kind, value in whole.items()
    }
