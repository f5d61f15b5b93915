"""Where the time of one lane goes: every moment of the step belongs to one term, and the terms add up to the step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardscope.analytic.terms import Term
from shardscope.prediction.simulate.graph import JOIN, Floats
from shardscope.prediction.simulate.replicas import Replicated

SOURCE = "event-level simulation"
SLOWER = "waiting for other replicas"


def busy_seconds(done: Replicated) -> Floats:
    """Return the seconds for which each lane of each copy computes."""
    graph, count = done.graph, done.graph.num_ops
    computes = np.array([kind != JOIN for kind in graph.kinds]) & (np.asarray(graph.links[::2]) < 0)
    computes &= np.asarray(graph.is_serial, bool)
    lanes, num = np.asarray(graph.op_lane, np.int64), len(graph.lanes)
    spent = (done.times.end - done.times.start)[: count * len(done.copies)].reshape(len(done.copies), count)
    rows = [np.bincount(lanes[computes], weights=row[computes], minlength=num) for row in spent]
    return np.concatenate(rows)


def lane_seconds(done: Replicated, lane: int, idle: str) -> dict[str, float]:
    """Return the seconds of each term on one lane.

    The lane's own operations count first. While it waits, the time belongs to what the next operation waits for, step
    by step backwards: to a message or collective if that was under way. Otherwise another lane computed: one of the same
    replica, which counts as `idle`, or one of another replica.

    Args:
        done: The simulated step.
        lane: Index of the lane, over all copies.
        idle: Term of idle time.
    """
    graph, times, count = done.graph, done.times, done.graph.num_ops
    copy, own = divmod(lane, len(graph.lanes))
    base, limit = copy * count, count * len(done.copies)
    mine = [
        base + i
        for i in range(count)
        if graph.op_lane[i] == own and graph.is_serial[i] and graph.kinds[i] != JOIN
    ]
    mine.sort(key=lambda op: (times.start[op], times.end[op]))
    seconds: dict[str, float] = {}

    def spend(kind: str, amount: float) -> None:
        if amount > 0:
            seconds[kind] = seconds.get(kind, 0.0) + amount

    def wait(op: int, low: float, high: float) -> None:
        """Divide the time between `low` and `high`, in which the lane waited for `op` to end."""
        while op >= 0 and high > low:
            begun = max(low, float(times.start[op])) if times.start[op] < high else high
            place = op % count if op < limit else -1
            if place >= 0 and begun < high:
                is_own = graph.links[2 * place] >= 0 or (op - base == place and graph.op_lane[place] == own)
                other = idle if op - base == place else SLOWER
                spend(graph.kinds[place] if is_own and graph.kinds[place] != JOIN else other, high - begun)
            high, op = begun, int(times.cause[op])
        spend(idle, high - low)

    now = 0.0
    for op in mine:
        start, end = float(times.start[op]), float(times.end[op])
        if start > now:
            wait(int(times.cause[op]), now, start)
            now = start
        spend(graph.kinds[op - base], end - now)
        now = max(now, end)
    if times.total > now:
        wait(int(times.end.argmax()), now, times.total)
    return seconds


def term_tree(seconds: Mapping[str, float], parents: Mapping[str, str], order: tuple[str, ...], total: float) -> Term:
    """Return the terms of a step as a tree, in the order of `order`; other terms follow.

    Args:
        seconds: Seconds of each term.
        parents: The term that includes a term, for those that are parts of another.
        order: Names of the terms at the top, in their order.
        total: Step time in seconds, to which the terms add up.
    """
    tops: dict[str, list[Term]] = {}
    for name, value in seconds.items():
        tops.setdefault(parents.get(name, name), []).append(Term(name, value, "s", "simulated", source=SOURCE))
    names = [*(name for name in order if name in tops), *(name for name in tops if name not in order)]
    parts = tuple(
        tops[name][0] if len(tops[name]) == 1 and tops[name][0].name == name else Term.total(name, tuple(tops[name]))
        for name in names
    )
    return Term("step", total, "s", parts=parts)
