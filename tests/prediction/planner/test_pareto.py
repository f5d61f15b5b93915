"""Fronts against their definition, pair by pair."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardscope.prediction.planner.pareto import Staircase, pareto_front, pareto_layers

POINTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=60)


def beats(points, one, other):
    """Whether `one` comes before `other` by any measure that prefers less time and more room."""
    (t, room), (other_t, other_room) = points[one], points[other]
    return (
        one != other
        and t <= other_t
        and room >= other_room
        and ((t, -room, one) < (other_t, -other_room, other))
    )


def columns(points):
    return np.array(points, float).T


@given(POINTS)
def test_the_front_is_what_no_other_beats(points):
    rows = range(len(points))
    alone = {row for row in rows if not any(beats(points, other, row) for other in rows)}
    front = pareto_front(*columns(points)).tolist()
    assert set(front) == alone
    assert [points[row][0] for row in front] == sorted(points[row][0] for row in front)


@given(POINTS, st.integers(1, 5))
def test_each_layer_is_the_front_once_those_before_are_gone(points, count):
    rows, layers = pareto_layers(*columns(points), count)
    left = set(range(len(points)))
    for number in range(count):
        front = {row for row in left if not any(beats(points, other, row) for other in left)}
        assert set(rows[layers == number].tolist()) == front
        left -= front


@given(POINTS, st.integers(1, 5), st.floats(0, 1))
def test_the_best_by_any_weighted_measure_are_in_the_first_layers(points, count, weight):
    time, room = columns(points)
    score = weight * time - (1 - weight) * room
    best = np.lexsort((-room, time, score))[:count]
    assert set(best.tolist()) <= set(pareto_layers(time, room, count)[0].tolist())


@given(POINTS, st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_a_staircase_tells_who_is_surely_beaten(points, row):
    beaten = Staircase(*columns(points)).beats(np.array([float(row[0])]), np.array([float(row[1])]))[0]
    assert beaten == any(t < row[0] and room >= row[1] for t, room in points)
