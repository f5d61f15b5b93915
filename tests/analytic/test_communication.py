from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.analytic import communication as comm

SIZES = st.integers(0, 10**7)
RANKS = st.integers(1, 64)


@given(SIZES, RANKS, st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]))
def test_a_ring_all_reduce_sends_what_no_algorithm_can_undercut(
    n: int, world: int, itemsize: int, ways: int
) -> None:
    sent = comm.ring_all_reduce_bytes(n, itemsize, world, directions=ways)
    assert sent.sum() == comm.all_reduce_bytes(n * itemsize, world)
    assert sent.max() - sent.min() <= 4 * itemsize


@given(SIZES, RANKS)
def test_chunks_cover_the_tensor(n: int, world: int) -> None:
    sizes = comm.chunk_sizes(n, world)
    assert sizes.sum() == n
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(("world", "expected"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_equal_chunks_give_the_textbook_formula(world: int, expected: float) -> None:
    assert comm.ring_all_reduce_bytes(800, 4, world) == pytest.approx(800 * 4 * expected)


@given(SIZES, RANKS, st.sampled_from([2, 4, 8]))
def test_a_tree_sends_as_much_as_a_ring_but_unevenly(n: int, world: int, itemsize: int) -> None:
    sent = comm.tree_all_reduce_bytes(n, itemsize, world)
    assert sent.sum() == comm.all_reduce_bytes(n * itemsize, world)
    assert sent.max() <= 3 * n * itemsize


@given(SIZES, st.integers(1, 8), st.integers(1, 8), st.sampled_from([2, 4, 8]))
def test_a_hierarchy_sends_as_much_as_a_ring_but_less_across(
    n: int, nodes: int, per_node: int, itemsize: int
) -> None:
    world = nodes * per_node
    sent = comm.hierarchical_all_reduce_bytes(n, itemsize, world, per_node)
    assert sent.total.shape == (world,)
    assert sent.total.sum() == comm.all_reduce_bytes(n * itemsize, world)
    assert sent.across.sum() == comm.all_reduce_bytes(n * itemsize, nodes)


def test_equal_shards_give_the_textbook_formula_of_a_hierarchy() -> None:
    sent = comm.hierarchical_all_reduce_bytes(800, 4, 8, 4)
    assert sent.inside == pytest.approx(800 * 4 * 2 * 3 / 4)
    assert sent.across == pytest.approx(800 * 4 / 4 * 2 * 1 / 2)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 8))
def test_every_micro_batch_crosses_every_boundary_there_and_back(
    boundaries: list[int], microbatches: int
) -> None:
    ranks = range(len(boundaries) + 1)
    sent = comm.pipeline_bytes(boundaries, ranks, microbatches)
    assert sent.sum() == 2 * microbatches * sum(boundaries)
    assert sent[0] == microbatches * boundaries[0]


def test_a_boundary_within_a_rank_costs_nothing() -> None:
    assert comm.pipeline_bytes([10, 100, 10], [0, 1, 1, 0], 2).tolist() == [40, 40]


def test_two_holders_of_a_tied_parameter_send_its_gradient_to_each_other() -> None:
    assert comm.tied_bytes(1000, 4, [0, 3], 4).tolist() == [4000, 0, 0, 4000]
