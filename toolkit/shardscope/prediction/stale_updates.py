"""Rate at which a parameter server uses the gradients of workers of different speeds, under a bound on staleness."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from shardscope.methods.strategies.parameter_server._admission import Admission

_ROUNDS = 60
"""Gradients of the slowest worker that are simulated; the first third is not counted, as workers start together."""
_WARM_UP = _ROUNDS // 3


def gradients_per_s(bound: float, cycle_s: Sequence[float]) -> float:
    """Return the number of gradients of all workers that the server uses per second.

    Workers take turns as in a run: each computes, pushes its gradient, and starts again when the server has applied it.
    The server follows the same rule as in a run (Ho et al. 2013, as in `ParameterServer`).

    With a bound between 0 and infinity, a faster worker may lower the rate, in random draws by up to a sixth, as list
    scheduling may (Graham, Bounds on multiprocessing timing anomalies, 1969). A gradient that arrives before another
    instead of with it is an update of its own, so the gradients that are still being computed are staler, and the next
    ones wait for them longer. Without a bound, and with 0, faster workers never lower it.

    Args:
        bound: Maximum staleness of a gradient, in updates; infinite for none.
        cycle_s: Seconds of each worker from the pull of parameters until its gradient arrives at the server.

    Example:
        >>> gradients_per_s(0, [1.0, 1.0, 1.0, 2.0])
        2.0
        >>> gradients_per_s(1, [1.0, 2.0]), round(gradients_per_s(1, [1.0, 1.8]), 2)
        (1.5, 1.39)
    """
    if math.isinf(bound):
        return sum(1 / each for each in cycle_s)
    rule = Admission(bound)
    workers = range(len(cycle_s))
    rule.pull(workers)
    queue = [(cycle_s[worker], worker) for worker in workers]
    heapq.heapify(queue)
    slowest = max(workers, key=lambda worker: cycle_s[worker])
    rounds, used, began_s, now = 0, 0, 0.0, 0.0
    while rounds < _ROUNDS:
        now, worker = heapq.heappop(queue)
        rule.push(worker)
        if not rule.is_due:
            continue
        update = rule.take()
        used += len(update.workers)
        rule.pull(update.workers)
        for each in update.workers:
            heapq.heappush(queue, (now + cycle_s[each], each))
        if slowest in update.workers:
            rounds += 1
            if rounds == _WARM_UP:
                used, began_s = 0, now
    return used / (now - began_s)
