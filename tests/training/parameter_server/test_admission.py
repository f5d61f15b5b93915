"""The rule of the parameter server, without ranks: whatever order messages come in."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.methods.strategies.parameter_server._admission import Admission

BOUNDS = st.sampled_from([0, 1, 2, 5, math.inf])


class Star:
    """Workers and servers whose messages come in any order.

    Attributes:
        staleness: Of every gradient applied.
        groups: The workers of every update.
        under_way: Servers that a worker's gradient has not reached yet.
        unanswered: Servers that a worker waits for.
    """

    def __init__(self, servers: int, workers: int, bound: float) -> None:
        self.rules = [Admission(bound) for _ in range(servers)]
        self.staleness: list[int] = []
        self.groups: list[list[int]] = []
        self.clocks = [0] * workers
        self.under_way: list[set[int]] = [set() for _ in range(workers)]
        self.unanswered: list[set[int]] = [set() for _ in range(workers)]
        for rule in self.rules:
            rule.pull(range(workers))

    def moves(self, steps: int) -> list[tuple[int, int | None]]:
        """What can happen next: a worker's gradient reaches a server, or (None) a worker has computed one."""
        arrivals = [(w, s) for w, servers in enumerate(self.under_way) for s in servers]
        ready = [w for w, servers in enumerate(self.unanswered) if not servers and self.clocks[w] < steps]
        return arrivals + [(w, None) for w in ready]

    def move(self, worker: int, server: int | None, steps: int) -> None:
        if server is None:
            self.under_way[worker] = set(range(len(self.rules)))
            self.unanswered[worker] = set(range(len(self.rules)))
            return
        self.under_way[worker].remove(server)
        self.rules[server].push(worker)
        self._apply(server, steps)

    def _apply(self, server: int, steps: int) -> None:
        rule = self.rules[server]
        if not rule.is_due:
            return
        update = rule.take()
        self.staleness += update.staleness
        self.groups.append(update.workers)
        rule.pull(update.workers)
        for worker in update.workers:
            self.unanswered[worker].discard(server)
            if not self.unanswered[worker]:
                self._answered(worker, steps)

    def _answered(self, worker: int, steps: int) -> None:
        self.clocks[worker] += 1
        if self.clocks[worker] == steps:
            for server, rule in enumerate(self.rules):
                rule.stop_computing(worker)
                self._apply(server, steps)


def play(star: Star, steps: int, choose: st.DataObject) -> bool:
    """Let things happen in the order drawn until nothing can; returns whether all workers took all steps."""
    while moves := star.moves(steps):
        star.move(*choose.draw(st.sampled_from(moves)), steps)
    return star.clocks == [steps] * len(star.clocks)


@given(st.integers(1, 3), st.integers(1, 5), BOUNDS, st.integers(1, 6), st.data())
def test_no_servers_wait_for_each_other_for_ever_and_no_gradient_is_staler_than_the_bound(
    servers: int, workers: int, bound: float, steps: int, data: st.DataObject
) -> None:
    star = Star(servers, workers, bound)
    assert play(star, steps, data)
    assert len(star.staleness) == servers * workers * steps
    assert max(star.staleness) <= bound
    if bound == 0:
        assert star.groups == [list(range(workers))] * (servers * steps)
    if bound == math.inf:
        assert all(len(group) == 1 for group in star.groups)


def test_an_update_thrown_away_makes_nobody_staler() -> None:
    rule = Admission(bound=math.inf)
    rule.pull([0, 1])
    rule.push(0)
    assert rule.take(applied=False).workers == [0]
    rule.push(1)
    assert rule.take().staleness == [0]


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_fast_worker_is_held_once_it_would_make_a_slow_one_too_stale(bound: int) -> None:
    rule = Admission(bound)
    rule.pull([0, 1])
    for _ in range(bound):
        rule.push(0)
        assert rule.is_due
        rule.take()
        rule.pull([0])
    rule.push(0)
    assert not rule.is_due
    rule.push(1)
    assert rule.is_due
    assert rule.take().staleness == [0, bound]
