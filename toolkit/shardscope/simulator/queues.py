"""Queues of operations that run one at a time, such as the kernels of a CUDA stream."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from shardscope.simulator.graph import Graph, Ints


def run_in_order(graph: Graph, queues: Sequence[Sequence[int]]) -> None:
    """Let the operations of each queue run one after another, in the queue's order unless dependencies require a
    different one.

    The order is fixed by edges before the graph runs, so the event loop needs no queues. An operation at the head of a
    queue may depend on a later operation, also through other queues. Operations that would deadlock in this way run in
    an order that their dependencies allow; all other operations keep their order.

    Args:
        graph: The graph; edges are added to it.
        queues: Operations of each queue; an operation is in at most one.
    """
    if not any(len(queue) > 1 for queue in queues):
        return
    count, edges = graph.num_ops, np.array(graph.edges, np.int64).reshape(-1, 2)
    wanted = np.concatenate([edges, _in_a_row(queues)])
    stuck = _places(count, wanted) < 0  # in a cycle, or behind one
    if stuck.any():
        stuck &= _places(count, wanted[:, ::-1]) < 0  # not those that are only behind cycles
        queues = _sorted(count, edges, queues, stuck.tolist())
    row = _in_a_row(queues)
    graph.order_many(row[:, 0], row[:, 1])


def _in_a_row(queues: Sequence[Sequence[int]]) -> Ints:
    """Return edges from each operation of a queue to the next; shape `(m, 2)`."""
    return np.asarray([pair for queue in queues for pair in pairwise(queue)], np.int64).reshape(-1, 2)


def _sorted(
    count: int, edges: Ints, queues: Sequence[Sequence[int]], is_stuck: Sequence[bool]
) -> list[list[int]]:
    """Return the queues with their deadlocked operations, which are adjacent, in an order that dependencies allow."""
    queued = [op for queue in queues for op in queue]
    rank = np.full(count, -1, np.int64)  # operations outside queues go first, as others may wait for them
    rank[queued] = np.arange(len(queued))
    order = np.argsort(rank, kind="stable")
    number = np.empty(count, np.int64)
    number[order] = np.arange(count)
    places = _places(count, number[edges])[number].tolist()
    found = []
    for queue in queues:
        stuck = iter(sorted((op for op in queue if is_stuck[op]), key=places.__getitem__))
        found.append([next(stuck) if is_stuck[op] else op for op in queue])
    return found


def _places(count: int, edges: Ints) -> Ints:
    """Return each operation's position in the topological order with low indices first; -1 in or after a cycle."""
    first = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(edges[:, 0], minlength=count), out=first[1:])
    following = edges[np.argsort(edges[:, 0], kind="stable"), 1].tolist()
    missing = np.bincount(edges[:, 1], minlength=count).tolist()
    starts, places = first.tolist(), [-1] * count
    ready = [op for op in range(count) if missing[op] == 0]
    heapify(ready)
    done = 0
    while ready:
        op = heappop(ready)
        places[op] = done
        done += 1
        for follower in following[starts[op] : starts[op + 1]]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heappush(ready, follower)
    return np.asarray(places, np.int64)
