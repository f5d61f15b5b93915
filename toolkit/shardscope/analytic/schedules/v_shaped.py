"""The V-shaped pipeline schedules ZBV and DualPipeV, in which rank r of p holds the two stages r and 2p-1-r.

A forward pass thus goes down from the first rank to the last and back up to the first. The first rank also holds the
last stage, so its first gradients are ready early, and all ranks hold about the same amount of activations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shardscope.analytic.schedules.table import ScheduledOp


@dataclass
class _Rank:
    """Builder for the order of one rank, which holds stages `down` and `up`; a stage runs micro-batches in order."""

    down: int
    up: int
    ops: list[ScheduledOp] = field(default_factory=list)
    _next: dict[tuple[str, int], int] = field(default_factory=dict)
    _pending_weights: deque[ScheduledOp] = field(default_factory=deque)

    def add(self, kind: str, stage: int) -> None:
        """Append an operation for the next micro-batch of a stage; an ``I`` also makes the ``W`` pending."""
        key = ("F" if kind == "F" else "W" if kind == "W" else "G", stage)
        batch = self._next.get(key, 0)
        self._next[key] = batch + 1
        self.ops.append(ScheduledOp(kind, stage, batch))
        if kind == "I":
            self._pending_weights.append(ScheduledOp("W", stage, batch))

    def add_oldest_weight(self) -> None:
        """Append the oldest pending ``W``, if any."""
        if self._pending_weights:
            self.ops.append(self._pending_weights.popleft())

    def add_weight_of(self, stage: int) -> None:
        """Append the oldest pending ``W`` of a stage, which must have one."""
        op = next(op for op in self._pending_weights if op.stage == stage)
        self._pending_weights.remove(op)
        self.ops.append(op)

    def has_pending_weight(self, stage: int) -> bool:
        """Return whether a stage has a pending ``W``."""
        return any(op.stage == stage for op in self._pending_weights)

    def add_input_and_weight(self, stage: int) -> None:
        """Append the ``I`` of a stage's next micro-batch, and then the oldest pending ``W`` of the stage."""
        self.add("I", stage)
        self.add_weight_of(stage)


def zbv(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:  # noqa: ARG001
    """Return one rank's order under ZBV: Qi et al., Zero bubble pipeline parallelism, 2023, section 6 and figure 7.

    The order is built for at least 2p-1 micro-batches on p ranks; with fewer, the surplus operations are dropped.
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
        row.add_input_and_weight(up)
    started, returned = 2 * (ranks - rank) - 1 + rank, ranks  # forwards so far, on `down` and on `up`
    while returned < started or started < total:
        if started < total:
            row.add("F", down)
            started += 1
        row.add_input_and_weight(down)
        row.add("F", up)
        returned += 1
        row.add_input_and_weight(up)
    for _ in range(rank):
        row.add("I", down)
        row.add("I", up)
    for _ in range(ranks - rank):
        row.add("I", down)
        row.add_weight_of(down)
    for stage in (up, down):
        while row.has_pending_weight(stage):
            row.add_weight_of(stage)
    return [op for op in row.ops if op.microbatch < microbatches]


def dualpipev(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:  # noqa: ARG001
    """Return one rank's order under DualPipeV: DualPipe folded into a V (DeepSeek-V3 report, 2024, section 3.2.1).

    In the steady state, a forward on one of the rank's stages is paired with a backward on the other, so that the
    communication of one overlaps with the computation of the other. The order follows the authors' eight steps.
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
        row.add_oldest_weight()
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
    """Append the last backward passes; in the second half of these, weight gradients are deferred to the end."""
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
        row.add_oldest_weight()
        row.add(kind, row.down)
    for _ in range(rank + 1):
        row.add_oldest_weight()
