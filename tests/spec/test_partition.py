"""The optimal split against trying every cut there is."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.errors import SpecError
from shardscope.spec.partition import even_split, optimal_split

COSTS = st.lists(st.integers(0, 100), min_size=1, max_size=9)


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(end - start for start, end in pairwise((0, *ends, num_layers)))
        for ends in combinations(range(1, num_layers), num_stages - 1)
    ]


def stage_costs(costs: list[int], split: tuple[int, ...]) -> list[int]:
    rest = iter(costs)
    return [sum(next(rest) for _ in range(size)) for size in split]


@given(COSTS, st.integers(1, 6))
def test_no_cut_has_a_smaller_largest_stage(costs: list[int], num_stages: int) -> None:
    if num_stages > len(costs):
        return
    split = optimal_split(costs, num_stages)
    assert len(split) == num_stages
    assert sum(split) == len(costs)
    assert min(split) >= 1

    def order(cut: tuple[int, ...]) -> tuple[int, int]:
        parts = stage_costs(costs, cut)
        return max(parts), sum(part * part for part in parts)

    assert order(split) == min(map(order, every_cut(len(costs), num_stages)))


@given(st.integers(1, 50), st.integers(1, 50))
def test_an_even_split_differs_by_one_layer_at_most(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        return
    split = even_split(num_layers, num_stages)
    assert sum(split) == num_layers
    assert max(split) - min(split) <= 1


@pytest.mark.parametrize("function", [lambda: even_split(3, 4), lambda: optimal_split([1, 1, 1], 4)])
def test_fewer_layers_than_stages_are_refused(function) -> None:
    with pytest.raises(SpecError, match="3 layers to split, fewer than the pipeline's 4 stages"):
        function()


@given(
    st.lists(st.integers(0, 100), min_size=3, max_size=7),
    st.lists(st.sampled_from([1, 2, 3]), min_size=2, max_size=3),
)
def test_no_cut_for_devices_of_unlike_speed_has_a_costlier_stage_than_needed(
    costs: list[int], slowness: list[int]
) -> None:
    def slowest(split: tuple[int, ...]) -> int:
        return max(slow * cost for slow, cost in zip(slowness, stage_costs(costs, split), strict=True))

    found = optimal_split(costs, len(slowness), slowness=slowness)
    assert slowest(found) == min(map(slowest, every_cut(len(costs), len(slowness))))
