"""The pipeline schedules V-Half and V-Min, which repeat one block of operations for every micro-batch.

The construction is from Qi et al., Pipeline parallelism with controllable memory, 2024 (arXiv 2405.15362). Time is
divided into equal slots. The building block assigns slots to the operations of one micro-batch, from its first forward
pass to its last input gradient. The block is repeated every six slots, and weight gradients fill the free slots. The
time for which a rank holds a micro-batch's activations within the block determines the rank's memory.

Finally, operations move to earlier slots that are free during warm-up and drain. They keep their order, and no rank
may hold more activations than in the steady state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache

from shardscope.analytic.schedules.table import ScheduledOp

PERIOD = 6
"""Slots that one micro-batch needs on a rank: forward, input and weight gradient, for each of the rank's two stages."""

Block = Callable[[int, int], tuple[int, int, int, int]]
"""Function of (rank, number of ranks) that returns the rank's four slots for micro-batch 0.

The slots are, in this order: forward on the rank's first stage, forward on its second stage, input gradient on its
second stage, input gradient on its first stage.
"""


def v_half(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:  # noqa: ARG001
    """Return one rank's order under V-Half, which holds half the activations of 1F1B.

    From the first rank to the last, forwards and input gradients advance one rank every two slots; from the last rank
    back to the first, one rank every slot.
    """
    return _orders_of(_half_block, ranks, microbatches)[rank]


def v_min(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:  # noqa: ARG001
    """Return one rank's order under V-Min, which holds a third of the activations of 1F1B.

    Forwards and input gradients advance one stage every slot.
    """
    return _orders_of(_min_block, ranks, microbatches)[rank]


def _half_block(rank: int, ranks: int) -> tuple[int, int, int, int]:
    """Return the building block of V-Half."""
    pause = (
        0 if ranks % 2 else 3
    )  # without this pause, two operations would share a slot if the number of ranks is even
    back = 3 * ranks - 1 + pause
    return 2 * rank, 3 * ranks - 2 - rank, back + 2 * rank, back + 3 * ranks - 1 - rank


def _min_block(rank: int, ranks: int) -> tuple[int, int, int, int]:
    """Return the building block of V-Min."""
    pause = 0 if ranks % 3 else 2
    back = 2 * ranks + pause
    return rank, 2 * ranks - 1 - rank, back + rank, back + 2 * ranks - 1 - rank


@lru_cache(maxsize=64)
def _orders_of(block: Block, ranks: int, microbatches: int) -> tuple[list[ScheduledOp], ...]:
    """Return the orders of all ranks, built slot by slot.

    In each slot, a rank runs its next planned operation if dependencies and memory allow, else a pending weight
    gradient.
    """
    rows = [_RankState(block, rank, ranks, microbatches) for rank in range(ranks)]
    done: set[tuple[str, int, int]] = set()
    while any(row.unfinished for row in rows):
        done.update([op for row in rows if (op := row.step(done))])
    return tuple(row.ops for row in rows)


class _RankState:
    """State of one rank: operations planned and done, pending weight gradients, and activations that still fit."""

    def __init__(self, block: Block, rank: int, ranks: int, microbatches: int) -> None:
        self.ops: list[ScheduledOp] = []
        self._last = 2 * ranks - 1
        self._planned = deque(_repeated(block(rank, ranks), (rank, self._last - rank), microbatches))
        self._pending_weights: deque[ScheduledOp] = deque()
        self._free = _most_held(block(rank, ranks))

    @property
    def unfinished(self) -> bool:
        """Whether planned operations or weight gradients remain to be computed."""
        return bool(self._planned or self._pending_weights)

    def step(self, done: set[tuple[str, int, int]]) -> ScheduledOp | None:
        """Run at most one operation in the current slot, and return it; None if the rank has to wait.

        Args:
            done: Operations that any rank has run in earlier slots.
        """
        if self._planned and self._is_runnable(self._planned[0], done):
            op = self._planned.popleft()
        elif self._pending_weights:
            op = self._pending_weights.popleft()
        else:
            return None
        self.ops.append(op)
        if op.op == "F":
            self._free -= 1
        elif op.op == "W":
            self._free += 1
        else:
            self._pending_weights.append(ScheduledOp("W", op.stage, op.microbatch))
        return op

    def _is_runnable(self, op: ScheduledOp, done: set[tuple[str, int, int]]) -> bool:
        """Return whether the operation's dependencies are done and, for a forward, its activations fit."""
        kind, stage, batch = op
        if kind == "F":
            return self._free > 0 and (stage == 0 or ("F", stage - 1, batch) in done)
        return ("F", stage, batch) in done and (stage == self._last or ("I", stage + 1, batch) in done)


def _repeated(
    slots: tuple[int, int, int, int], stages: tuple[int, int], microbatches: int
) -> list[ScheduledOp]:
    """Return a rank's forwards and input gradients for all micro-batches, in slot order."""
    down, up = stages
    life = list(zip(slots, "FFII", (down, up, up, down), strict=True))
    placed = [
        (slot + PERIOD * i, ScheduledOp(kind, at, i)) for i in range(microbatches) for slot, kind, at in life
    ]
    return [op for _, op in sorted(placed)]


def _most_held(slots: tuple[int, int, int, int]) -> int:
    """Return the peak number of activations that a rank holds in the steady state.

    The activations of one micro-batch on one stage count as 1. Weight gradients, which free them, run in free slots.
    """
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
