"""The event loop: order of operations, fair shares of links, and its two forms."""

from __future__ import annotations

import numpy as np
import pytest

import shardscope as ss
from shardscope.simulator import graph as graph_module
from shardscope.simulator.graph import FEWEST, Graph, form


def test_operations_start_when_all_that_they_wait_for_has_ended() -> None:
    graph = Graph(["rank 0"])
    first, second = graph.add(0, "a", 1.0), graph.add(0, "b", 3.0)
    third = graph.add(0, "c", 2.0, after=(first, second))
    times = graph.run()
    assert times.start.tolist() == [0.0, 0.0, 3.0]
    assert times.end[third] == times.total == 5.0
    assert times.cause.tolist() == [-1, -1, second]


def test_messages_on_one_link_share_it_and_speed_up_when_others_end() -> None:
    graph = Graph(["rank 0"])
    link = graph.link("out", 100.0)
    graph.add(0, "short", size=50.0, links=[link])
    graph.add(0, "long", size=150.0, links=[link])
    graph.add(0, "late", 1.5, size=25.0, links=[link])
    assert graph.run().end.tolist() == pytest.approx([1.0, 2.25, 2.0])


def test_shares_are_max_min_fair() -> None:
    """A message that another link limits leaves the rest of its share to the others."""
    graph = Graph(["rank 0"])
    wide, narrow = graph.link("wide", 90.0), graph.link("narrow", 20.0)
    graph.add(0, "limited", size=20.0, links=[wide, narrow])
    graph.add(0, "other", size=35.0, links=[wide])
    graph.add(0, "another", size=35.0, links=[wide])
    assert graph.run().end.tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_a_share_follows_a_chain_of_links() -> None:
    """The end of one message frees its link; through the links in between, a message elsewhere gets slower."""
    graph = Graph(["rank 0"])
    a, b = graph.link("a", 10.0), graph.link("b", 10.0)
    graph.add(0, "on a", size=5.0, links=[a])
    graph.add(0, "on both", size=20.0, links=[a, b])
    graph.add(0, "on b", size=20.0, links=[b])
    times = graph.run()
    assert times.end[0] == pytest.approx(1.0)
    assert times.end[1] == times.end[2] == pytest.approx(4.0)


def test_operations_that_wait_for_each_other_are_refused() -> None:
    graph = Graph(["rank 0"])
    first = graph.add(0, "a", 1.0)
    second = graph.add(0, "b", 1.0, after=[first])
    graph.order(second, first)
    with pytest.raises(ss.SpecError, match="2 operations wait for each other"):
        graph.run()
    with pytest.raises(ss.SpecError, match="give a positive, finite number"):
        graph.link("none", np.inf)


def _random_graph(seed: int) -> Graph:
    draw, graph = np.random.default_rng(seed), Graph([f"rank {rank}" for rank in range(6)])
    links = [graph.link(str(k), float(draw.integers(1, 5))) for k in range(8)]
    for op in range(300):
        used = draw.choice(links, size=draw.integers(0, 3), replace=False).tolist()
        before = draw.integers(0, op, size=min(op, 2)).tolist() if op else []
        graph.add(
            op % 6, "x", float(draw.integers(0, 3)), size=float(draw.integers(1, 9)), links=used, after=before
        )
    return graph


@pytest.mark.parametrize("seed", range(8))
def test_compiled_and_interpreted_loops_agree_to_the_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    graph, found = _random_graph(seed), []
    for name in ("numba", "python"):
        monkeypatch.setenv("SHARDSCOPE_SIMULATOR", name)
        found.append(graph.run())
    assert found[0].num_events == found[1].num_events > 300
    for column in ("start", "end", "cause"):
        np.testing.assert_array_equal(getattr(found[0], column), getattr(found[1], column))


@pytest.mark.parametrize("seed", range(4))
def test_links_never_carry_more_than_their_capacity_and_all_bytes_arrive(seed: int) -> None:
    """Whatever shares a link, its bytes take at least as long as they would at its full rate."""
    graph = _random_graph(seed)
    times, links = graph.run(), np.asarray(graph.links).reshape(-1, 2)
    sent_from = times.start + np.asarray(graph.fixed)
    for link, capacity in enumerate(graph.capacity):
        mine = (links == link).any(axis=1)
        size, begun, ended = np.asarray(graph.size)[mine], sent_from[mine], times.end[mine]
        for until in ended:
            for since in begun:
                inside = (begun >= since) & (ended <= until)
                assert size[inside].sum() <= capacity * max(0.0, until - since) * (1 + 1e-9) + 1e-9


def test_small_graphs_are_not_worth_loading_the_compiled_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.delenv("SHARDSCOPE_SIMULATOR", raising=False)
    graph_module._compiled_loop.cache_clear()
    assert [form(FEWEST - 1), form(FEWEST)] == ["python", "numba"]
    graph_module._compiled_loop()
    assert form(1) == "numba"
    monkeypatch.setenv("SHARDSCOPE_SIMULATOR", "fortran")
    with pytest.raises(ss.SpecError, match="use numba or python"):
        form(1)
