"""Queues: one operation at a time, in an order that dependencies allow."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.simulator.graph import Graph
from shardscope.simulator.queues import run_in_order


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, list[list[int]]]:
    """Draw a graph without cycles, and queues over most of its operations in any order."""
    count = draw(st.integers(1, 14))
    order = draw(st.permutations(range(count)))
    graph = Graph(["rank 0"])
    for _ in range(count):
        graph.add(0, "work", 1.0)
    for a, b in draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=20)):
        if a != b:
            graph.order(order[min(a, b)], order[max(a, b)])
    place = draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count))
    return graph, [[op for op in range(count) if place[op] == queue] for queue in range(3)]


@given(graphs())
def test_every_graph_still_runs_and_no_two_operations_of_a_queue_overlap(
    drawn: tuple[Graph, list[list[int]]],
) -> None:
    graph, queues = drawn
    run_in_order(graph, queues)
    times = graph.run()
    for queue in queues:
        spans = sorted((times.start[op], times.end[op]) for op in queue)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


@given(graphs())
def test_queues_whose_order_contradicts_no_dependency_keep_it(drawn: tuple[Graph, list[list[int]]]) -> None:
    graph, queues = drawn
    ends = graph.run().end
    queues = [sorted(queue, key=lambda op: (ends[op], -op)) for queue in queues]
    run_in_order(graph, queues)
    times = graph.run()
    for queue in queues:
        assert queue == sorted(queue, key=lambda op: times.start[op])


def test_only_the_operations_that_would_wait_for_each_other_change_places() -> None:
    graph = Graph(["rank 0", "rank 1", "rank 2"])
    first = [graph.add(0, "work", 1.0) for _ in range(4)]
    graph.order(first[2], first[1])
    second = [graph.add(1, "work", 1.0) for _ in range(2)]
    graph.order(first[1], second[0])  # the head waits, but not for the rest of its own queue
    run_in_order(graph, [first, second])
    times = graph.run()
    assert [times.start[op] for op in first] == [0.0, 2.0, 1.0, 3.0]
    assert [times.start[op] for op in second] == [3.0, 4.0]


def test_a_cycle_of_dependencies_is_still_refused() -> None:
    graph = Graph(["rank 0"])
    ops = [graph.add(0, "work", 1.0) for _ in range(3)]
    graph.order(ops[0], ops[1])
    graph.order(ops[1], ops[0])
    run_in_order(graph, [ops])
    with pytest.raises(ss.SpecError, match="wait for each other"):
        graph.run()
