"""V-Half and V-Min: a building block repeated for each micro-batch, compacted at both ends.

Qi et al., Pipeline parallelism with controllable memory, 2024 (arXiv 2405.15362): the operations of one micro-batch,
from its first forward to its last input gradient, are placed on a grid of equal slots and repeated every six slots;
weight gradients take the free slots. The lifetime of a micro-batch on a rank determines the memory of the rank. Then
all operations move forward, in the same order, into slots that are free in warm-up and drain, as long as no rank holds
more than in the steady state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache

from shardscope.analytic.schedules.table import ScheduledOp

PERIOD = 6
"""Slots that one micro-batch needs on a rank: one forward and two gradients for each of its two stages."""

Block = Callable[[int, int], tuple[int, int, int, int]]
"""Function from (rank, ranks) to the rank's slots of micro-batch 0: forward down and up, input gradient up and down."""


def v_half(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:  # noqa: ARG001
    """Return one rank's order under V-Half, which holds half the activations of 1F1B.

    Forwards on the way down and gradients on the way up run at half pace.
    """
    return _squeezed(_half_block, ranks, microbatches)[rank]


def v_min(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:  # noqa: ARG001
    """Return one rank's order under V-Min, which holds a third of the activations of 1F1B.

    Each micro-batch passes through the stages without a pause.
    """
    return _squeezed(_min_block, ranks, microbatches)[rank]


def _half_block(rank: int, ranks: int) -> tuple[int, int, int, int]:
    pause = (
        0 if ranks % 2 else 3
    )  # without it, with an even number of ranks, two operations take the same slot
    back = 3 * ranks - 1 + pause
    return 2 * rank, 3 * ranks - 2 - rank, back + 2 * rank, back + 3 * ranks - 1 - rank


def _min_block(rank: int, ranks: int) -> tuple[int, int, int, int]:
    pause = 0 if ranks % 3 else 2
    back = 2 * ranks + pause
    return rank, 2 * ranks - 1 - rank, back + rank, back + 2 * ranks - 1 - rank


@lru_cache(maxsize=64)
def _squeezed(block: Block, ranks: int, microbatches: int) -> tuple[list[ScheduledOp], ...]:
    """Fill the slots in order: each rank runs its next operation if that is ready and fits, else a weight gradient."""
    rows = [_RankState(block, rank, ranks, microbatches) for rank in range(ranks)]
    done: set[tuple[str, int, int]] = set()
    while any(row.unfinished for row in rows):
        done.update([op for row in rows if (op := row.step(done))])
    return tuple(row.ops for row in rows)


class _RankState:
    """State of one rank: its planned order, the operations done, and the free memory."""

    def __init__(self, block: Block, rank: int, ranks: int, microbatches: int) -> None:
        self.ops: list[ScheduledOp] = []
        self._last = 2 * ranks - 1
        self._planned = deque(_repeated(block(rank, ranks), (rank, self._last - rank), microbatches))
        self._owed: deque[ScheduledOp] = deque()
        self._free = _most_held(block(rank, ranks))

    @property
    def unfinished(self) -> bool:
        """Whether operations remain."""
        return bool(self._planned or self._owed)

    def step(self, done: set[tuple[str, int, int]]) -> ScheduledOp | None:
        """Run the rank's operation of one slot, if any, given the operations that were done before it."""
        if self._planned and self._can(self._planned[0], done):
            op = self._planned.popleft()
        elif self._owed:
            op = self._owed.popleft()
        else:
            return None
        self.ops.append(op)
        if op.op == "F":
            self._free -= 1
        elif op.op == "W":
            self._free += 1
        else:
            self._owed.append(ScheduledOp("W", op.stage, op.microbatch))
        return op

    def _can(self, op: ScheduledOp, done: set[tuple[str, int, int]]) -> bool:
        kind, stage, batch = op
        if kind == "F":
            return self._free > 0 and (stage == 0 or ("F", stage - 1, batch) in done)
        return ("F", stage, batch) in done and (stage == self._last or ("I", stage + 1, batch) in done)


def _repeated(
    slots: tuple[int, int, int, int], stages: tuple[int, int], microbatches: int
) -> list[ScheduledOp]:
    """Return the forwards and input gradients of all micro-batches, in slot order."""
    down, up = stages
    life = list(zip(slots, "FFII", (down, up, up, down), strict=True))
    placed = [
        (slot + PERIOD * i, ScheduledOp(kind, at, i)) for i in range(microbatches) for slot, kind, at in life
    ]
    return [op for _, op in sorted(placed)]


def _most_held(slots: tuple[int, int, int, int]) -> int:
    """Peak activations of a rank in the steady state, with weight gradients in the free slots."""
    repeats = slots[-1] // PERIOD + 4
    kinds = {
        slot + PERIOD * i: kind for i in range(repeats) for slot, kind in zip(slots, "FFII", strict=True)
    }
    held = peak = owed = 0
    for slot in range(PERIOD * repeats):
        kind = kinds.get(slot)
        held += kind == "F"
        owed += kind == "I"
        if kind is None and owed:
            owed, held = owed - 1, held - 1
        peak = max(peak, held)
    return peak
