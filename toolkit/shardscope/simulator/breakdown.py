"""Breakdown of the time of one lane: every moment of the step belongs to one term, and the terms add up to the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardscope.analytic.terms import Term
from shardscope.simulator.graph import JOIN, Flags, Floats, Graph
from shardscope.simulator.replicas import Replicated

SOURCE = "event-level simulation"
SLOWER = "waiting for other replicas"


def busy_seconds(done: Replicated) -> Floats:
    """Return the seconds for which each lane of each copy computes."""
    graph, count = done.graph, done.graph.num_ops
    computes = _occupies(graph) & (graph.first_links < 0)
    lanes, num = np.asarray(graph.op_lane, np.int64), len(graph.lanes)
    spent = (done.times.end - done.times.start)[: count * len(done.copies)].reshape(len(done.copies), count)
    rows = [np.bincount(lanes[computes], weights=row[computes], minlength=num) for row in spent]
    return np.concatenate(rows)


def _occupies(graph: Graph) -> Flags:
    """Return whether each operation occupies its lane."""
    found: Flags = np.asarray(graph.is_serial, bool) & ~np.asarray(graph.is_join, bool)
    return found


def lane_spans(done: Replicated) -> Floats:
    """Return the time from the start of each lane's first operation to the end of its last, in seconds."""
    graph, count = done.graph, done.graph.num_ops
    lanes, num = np.asarray(graph.op_lane, np.int64), len(graph.lanes)
    counted = _occupies(graph)
    spans = []
    for copy in range(len(done.copies)):
        part = slice(copy * count, (copy + 1) * count)
        first, last = np.full(num, np.inf), np.zeros(num)
        np.minimum.at(first, lanes[counted], done.times.start[part][counted])
        np.maximum.at(last, lanes[counted], done.times.end[part][counted])
        spans.append(np.maximum(last - first, 0.0))
    return np.concatenate(spans)


def lane_seconds(done: Replicated, lane: int, idle: str) -> dict[str, float]:
    """Return the seconds of each term on one lane; they add up to the step time, the longest span of a lane.

    The lane's own operations count first. While the lane waits, the time belongs to whatever its next operation waits
    for, traced backwards step by step: a message or collective if one was in progress. Otherwise, another lane
    computed: a lane of the same replica, which counts as `idle`, or a lane of another replica. If the lane's span is
    shorter than the longest span, the difference counts as `idle` too.

    Args:
        done: The simulated step.
        lane: Index of the lane, over all copies.
        idle: Term of idle time.
    """
    seconds: dict[str, float] = {}
    waits = _Waits(done, lane, idle, seconds)
    graph, times, base = done.graph, done.times, waits.base
    mine = base + np.flatnonzero(_occupies(graph) & (np.asarray(graph.op_lane) == waits.own))
    mine = mine[np.lexsort((times.end[mine], times.start[mine]))]
    now = float(times.start[mine[0]]) if len(mine) else 0.0
    for op in mine.tolist():
        start, end = float(times.start[op]), float(times.end[op])
        if start > now:
            waits.add(int(times.cause[op]), now, start)
            now = start
        waits.spend(graph.kinds[op - base], end - now)
        now = max(now, end)
    waits.spend(idle, float(lane_spans(done).max()) - sum(seconds.values()))
    return seconds


@dataclass
class _Waits:
    """Divides the waiting time of one lane into terms."""

    done: Replicated
    lane: int
    idle: str
    seconds: dict[str, float]

    def __post_init__(self) -> None:
        copy, self.own = divmod(self.lane, len(self.done.graph.lanes))
        self.base = copy * self.done.graph.num_ops

    def spend(self, kind: str, amount: float) -> None:
        """Add seconds to a term."""
        if amount > 0:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + amount

    def add(self, op: int, low: float, high: float) -> None:
        """Divide the time between `low` and `high`, in which the lane waited for operation `op` to end."""
        times, limit = self.done.times, self.done.graph.num_ops * len(self.done.copies)
        while op >= 0 and high > low:
            begun = min(high, max(low, float(times.start[op])))
            if op < limit:
                self.spend(self._kind(op), high - begun)
            high, op = begun, int(times.cause[op])
        self.spend(self.idle, high - low)

    def _kind(self, op: int) -> str:
        """Return the term to which waiting for an operation belongs."""
        graph = self.done.graph
        copy, place = divmod(op, graph.num_ops)
        is_here = copy * graph.num_ops == self.base
        if graph.kinds[place] != JOIN and (
            graph.links[graph.width * place] >= 0 or (is_here and graph.op_lane[place] == self.own)
        ):
            return graph.kinds[place]
        return self.idle if is_here else SLOWER


def term_tree(seconds: Mapping[str, float], parents: Mapping[str, str], order: tuple[str, ...]) -> Term:
    """Return the terms of a step as a tree, in the order of `order`; other terms follow.

    Args:
        seconds: Seconds of each term.
        parents: The enclosing term of each term that is part of another term.
        order: Names of the terms at the top, in their order.
    """
    tops: dict[str, list[Term]] = {}
    for name, value in seconds.items():
        tops.setdefault(parents.get(name, name), []).append(
            Term(name, value, "s", "simulated", source=SOURCE)
        )
    names = [*(name for name in order if name in tops), *(name for name in tops if name not in order)]
    parts = tuple(
        tops[name][0]
        if len(tops[name]) == 1 and tops[name][0].name == name
        else Term.total(name, tuple(tops[name]))
        for name in names
    )
    return Term.total("step", parts)
