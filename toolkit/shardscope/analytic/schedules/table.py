"""The table of a schedule, and what follows from it: times, bubble and activations held."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Op(NamedTuple):
    """One operation of one stage on one micro-batch."""

    op: str
    """``F`` forward, ``B`` backward, ``I`` backward for the input only, ``W`` backward for the weights only."""
    stage: int
    microbatch: int


class Timed(NamedTuple):
    """An operation with its place in time, in units of a forward pass of one stage."""

    op: Op
    start: float
    end: float


DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""The textbook's: a backward pass takes two forward passes, half for the input and half for the weights."""


@dataclass(frozen=True)
class Table:
    """The operations of every rank in order, and the rank of every stage."""

    ranks: tuple[tuple[Op, ...], ...]
    stage_ranks: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self.stage_ranks)

    def timed(self, durations: dict[str, float] | None = None) -> tuple[tuple[Timed, ...], ...]:
        """Every operation as early as it can be: after its rank's previous one, and after what it needs from others.

        Sending takes no time.

        Args:
            durations: Of each kind of operation on one stage; default `DURATIONS`.

        Raises:
            ValueError: The order cannot be carried out: each rank waits for another.
        """
        costs = durations or DURATIONS
        ends: dict[tuple[str, int, int], float] = {}
        rows: list[list[Timed]] = [[] for _ in self.ranks]
        while any(len(row) < len(ops) for row, ops in zip(rows, self.ranks, strict=True)):
            before = len(ends)
            for row, ops in zip(rows, self.ranks, strict=True):
                self._advance(row, ops, ends, costs)
            if len(ends) == before:
                raise ValueError("the schedule deadlocks: every rank waits for another")
        return tuple(tuple(row) for row in rows)

    def _advance(
        self,
        row: list[Timed],
        ops: tuple[Op, ...],
        ends: dict[tuple[str, int, int], float],
        costs: dict[str, float],
    ) -> None:
        while len(row) < len(ops):
            op = ops[len(row)]
            needs = self._needs(op)
            if any(need not in ends for need in needs):
                return
            start = max([row[-1].end if row else 0.0, *(ends[need] for need in needs)])
            row.append(Timed(op, start, start + costs[op.op]))
            key = "G" if op.op in "BI" else op.op
            ends[key, op.stage, op.microbatch] = row[-1].end

    def _needs(self, op: Op) -> list[tuple[str, int, int]]:
        """What must be over before `op` begins; G stands for the gradient of a stage's input."""
        stage, batch = op.stage, op.microbatch
        if op.op == "F":
            return [("F", stage - 1, batch)] if stage else []
        if op.op == "W":
            return [("G", stage, batch)]
        last = stage == self.num_stages - 1
        return [("F", stage, batch), *([] if last else [("G", stage + 1, batch)])]

    @cached_property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time, from the first operation to the last, in which they wait.

        With the durations of `DURATIONS`. GPipe and 1F1B: (p-1) / (m+p-1) for p stages and m micro-batches
        (Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2, state it as a share of the work, (p-1)/m).
        """
        rows = self.timed()
        end = max(row[-1].end for row in rows)
        busy = sum(timed.end - timed.start for row in rows for timed in row)
        return 1 - busy / (end * len(rows))

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Micro-batches whose activations each stage holds at most, by stage.

        They are stored by the forward pass and freed by the backward pass, or by that for the weights where it is
        split.
        """
        held = [0] * self.num_stages
        peak = [0] * self.num_stages
        for ops in self.ranks:
            for op in ops:
                held[op.stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[op.op]
                peak[op.stage] = max(peak[op.stage], held[op.stage])
        return tuple(peak)
