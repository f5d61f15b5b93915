"""Fronts against their definition, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.analytic.pareto import dominates, front, front_numbers, lexical_order

Row = Sequence[float]
COST = st.sampled_from([0.0, -0.0, 1.0, 2.0, 3.0, math.inf, -math.inf, math.nan])
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.tuples(*[COST] * width), max_size=25).map(lambda rows: rows * 2)
)
NUMBERS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=60)


def naive(one: Row, other: Row) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(
        a < b for a, b in zip(one, other, strict=True)
    )


def beats(table: Sequence[Row], one: int, other: int, in_turn: bool) -> bool:
    same = all(a == b for a, b in zip(table[one], table[other], strict=True))
    return naive(table[one], table[other]) or (in_turn and same and one < other)


def peeled(table: Sequence[Row], in_turn: bool) -> list[int]:
    """The front of each row, taken off one by one."""
    left, numbers = set(range(len(table))), [0] * len(table)
    number = 0
    while left:
        lead = {a for a in left if not any(beats(table, b, a, in_turn) for b in left)}
        for row in lead:
            numbers[row] = number
        left, number = left - lead, number + 1
    return numbers


@given(TABLES, st.booleans(), st.none() | st.integers(1, 4))
def test_fronts_are_those_of_the_definition(table: list[Row], in_turn: bool, count: int | None) -> None:
    expected = peeled(table, in_turn)
    found = front_numbers(table, count=count, in_turn=in_turn).tolist()
    assert found == [number if count is None else min(number, count) for number in expected]
    assert front(table, in_turn=in_turn).tolist() == [
        row for row, number in enumerate(expected) if number == 0
    ]


@given(TABLES.filter(len))
def test_who_dominates_whom_is_told_of_all_pairs_at_once(table: list[Row]) -> None:
    rows = np.array(table, float)
    found = dominates(rows[:, None], rows[None, :])
    assert found.tolist() == [[naive(one, other) for other in table] for one in table]


@given(NUMBERS, st.booleans())
def test_no_row_is_dominated_by_one_that_comes_later_in_order(table: list[Row], in_turn: bool) -> None:
    order = lexical_order(table).tolist()
    for place, row in enumerate(order):
        assert not any(beats(table, later, row, in_turn) for later in order[place + 1 :])


@given(NUMBERS, st.integers(1, 5), st.floats(0, 1))
def test_the_best_by_any_weighted_measure_are_on_the_first_fronts(
    table: list[Row], count: int, weight: float
) -> None:
    x, y = np.array(table, float).T
    best = np.lexsort((y, x, weight * x + (1 - weight) * y))[:count]
    assert (front_numbers(table, count=count, in_turn=True)[best] < count).all()


@pytest.mark.parametrize("table", [[], [()], [(), ()]])
def test_without_rows_or_costs_nobody_is_dominated(table: list[Row]) -> None:
    assert front(table).tolist() == list(range(len(table)))
