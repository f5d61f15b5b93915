"""Two stages per rank in the shape of a V: rank r of p holds stage r on the way down and 2p-1-r on the way up.

The last stage is on the first rank, so the first gradients are ready early, and all ranks hold about the same number of
activations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shardscope.analytic.schedules.table import ScheduledOp


@dataclass
class _Rank:
    """Builds the operations of one rank; each stage processes its micro-batches in order."""

    down: int
    up: int
    ops: list[ScheduledOp] = field(default_factory=list)
    _next: dict[tuple[str, int], int] = field(default_factory=dict)
    _owed: deque[ScheduledOp] = field(default_factory=deque)

    def add(self, kind: str, stage: int) -> None:
        """Add the next micro-batch of a stage; an ``I`` leaves its ``W`` pending."""
        key = ("F" if kind == "F" else "W" if kind == "W" else "G", stage)
        batch = self._next.get(key, 0)
        self._next[key] = batch + 1
        self.ops.append(ScheduledOp(kind, stage, batch))
        if kind == "I":
            self._owed.append(ScheduledOp("W", stage, batch))

    def pay(self) -> None:
        """Add the oldest pending ``W``, if any."""
        if self._owed:
            self.ops.append(self._owed.popleft())

    def pay_stage(self, stage: int) -> None:
        """Add the oldest pending ``W`` of one stage."""
        op = next(op for op in self._owed if op.stage == stage)
        self._owed.remove(op)
        self.ops.append(op)

    def owes(self, stage: int) -> bool:
        """Whether a stage has a pending ``W``."""
        return any(op.stage == stage for op in self._owed)

    def both(self, stage: int) -> None:
        """Add ``I`` and ``W`` of a stage, one right after the other."""
        self.add("I", stage)
        self.pay_stage(stage)


def zbv(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:  # noqa: ARG001
    """Return one rank's order under ZBV: Qi et al., Zero bubble pipeline parallelism, 2023, section 6 and figure 7.

    The order is built for at least 2p-1 micro-batches; if there are fewer, operations of the missing ones are dropped.
    """
    total = max(2 * ranks - 1, microbatches)
    row = _Rank(rank, 2 * ranks - 1 - rank)
    down, up = row.down, row.up
    for _ in range(2 * (ranks - rank) - 1):
        row.add("F", down)
    for _ in range(rank):
        row.add("F", up)
        row.add("F", down)
    for _ in range(ranks - rank):
        row.add("F", up)
        row.both(up)
    started, returned = 2 * (ranks - rank) - 1 + rank, ranks  # forwards so far, down and up
    while returned < started or started < total:
        if started < total:
            row.add("F", down)
            started += 1
        row.both(down)
        row.add("F", up)
        returned += 1
        row.both(up)
    for _ in range(rank):
        row.add("I", down)
        row.add("I", up)
    for _ in range(ranks - rank):
        row.add("I", down)
        row.pay_stage(down)
    for stage in (up, down):
        while row.owes(stage):
            row.pay_stage(stage)
    return [op for op in row.ops if op.microbatch < microbatches]


def dualpipev(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:  # noqa: ARG001
    """Return one rank's order under DualPipeV: DeepSeek-V3 technical report, 2024, section 3.2.1, folded into a V.

    In the steady state a forward of one stage is paired with a backward of the other, so that the communication of one
    overlaps the computation of the other. The eight steps are those of the authors' description.
    """
    row = _Rank(rank, 2 * ranks - 1 - rank)
    down, up, hops = row.down, row.up, ranks - rank - 1
    for _ in range(2 * hops):
        row.add("F", down)
    for _ in range(rank + 1):
        row.add("F", down)
        row.add("F", up)
    for _ in range(hops):
        row.add("I", up)
        row.pay()
        row.add("F", up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        row.add("F", down)
        row.add("B", up)
        row.add("F", up)
        row.add("B", down)
    for _ in range(hops):
        row.add("B", up)
        row.add("F", up)
        row.add("B", down)
    _drain(row, rank, hops)
    return row.ops


def _drain(row: _Rank, rank: int, hops: int) -> None:
    """Add the last backwards; from the middle on, weight gradients are deferred to the end."""
    kind = "B"
    for i in range(rank + 1):
        middle = i == (rank + 1) // 2
        if middle and rank % 2:
            kind = "I"
        row.add(kind, row.up)
        if middle and not rank % 2:
            kind = "I"
        row.add(kind, row.down)
    for _ in range(hops):
        row.pay()
        row.add(kind, row.down)
    for _ in range(rank + 1):
        row.pay()
