"""The binary tree segment by segment: each rank sends at most one segment a round and receives at most one.

Parents serve their children in turn. With two children and a parent, a rank has three to send a segment to or from each
way, so that every edge gets every third round; which of the three is tried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from analytic.communication.wire import Move, Wire

Slots = dict[int, tuple[int, int]]
"""By child: the round, modulo the period, in which it sends up and in which it is sent to."""


def children(rank: int, workers: int) -> list[int]:
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < workers]


def schedules(workers: int) -> Iterator[tuple[int, Slots]]:
    """Ways to give out the rounds, each with its period."""
    if workers <= 2:
        yield 1, {1: (0, 0)}
        return
    if workers <= 4:
        for up, down in product((0, 1), repeat=2):
            yield 2, {1: (up, down), 2: (1 - up, 1 - down), 3: (1 - down, 1 - up)}
        return
    for first, later_up, later_down in product(range(3), (False, True), (False, True)):
        yield 3, _slots(workers, first, later_up, later_down)


def _slots(workers: int, first: int, later_up: bool, later_down: bool) -> Slots:
    slots: Slots = {0: (2, (first + 2) % 3)}
    for rank in range(workers):
        up, down = slots[rank]
        into = sorted({0, 1, 2} - {down}, key=lambda slot: (up - slot - 1) % 3, reverse=not later_up)
        out = sorted({0, 1, 2} - {up}, key=lambda slot: (slot - down - 1) % 3, reverse=later_down)
        slots |= dict(zip(children(rank, workers), zip(into, out, strict=True), strict=False))
    return slots


def run_tree_in_segments(workers: int, segments: int) -> Wire:
    """The fastest of the schedules."""
    runs = [_run(workers, segments, period, slots) for period, slots in schedules(workers)]
    return min(runs, key=lambda wire: wire.rounds)


def _run(workers: int, segments: int, period: int, slots: Slots) -> Wire:
    wire = Wire(workers, segments)
    everyone = frozenset(range(workers))
    below = [frozenset({rank}) for rank in range(workers)]
    for rank in range(workers - 1, 0, -1):
        below[(rank - 1) // 2] |= below[rank]
    climbed, fell = [0] * workers, [0] * workers
    idle = 0
    while min(fell[1:], default=segments) < segments:
        now = (wire.rounds + idle) % period
        moves = []
        for child in range(1, workers):
            parent, (up, down) = (child - 1) // 2, slots[child]
            if up == now and climbed[child] < segments and wire.holds[child][climbed[child]] == below[child]:
                moves.append(Move(child, parent, climbed[child], adds=True))
            if down == now and fell[child] < segments and wire.holds[parent][fell[child]] == everyone:
                moves.append(Move(parent, child, fell[child]))
        ports = [(move.source, "out") for move in moves] + [(move.target, "in") for move in moves]
        assert len(set(ports)) == len(ports), "a rank would send or receive two segments at once"
        wire.step(moves)
        idle += not moves
        for move in moves:
            (climbed if move.adds else fell)[move.source if move.adds else move.target] += 1
    wire.rounds += idle
    return wire
