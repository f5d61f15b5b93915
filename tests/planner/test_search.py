"""The search is exact: it agrees with a plain loop over the same formulas, whatever it leaves out early."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.brute import (
    CALIBRATION,
    NARROW,
    every_layout,
    machine,
    scored,
    small_model,
    space,
    with_fewest_recomputed,
)
from shardscope.planner import plan
from shardscope.planner.search import Staircase

SMALL = {"schedule": ["1f1b", "interleaved", "zb-h1"], "offload": ["none", "all"]}


def search(model, cluster, **settings):
    fix = NARROW | SMALL | settings.pop("fix", {})
    return plan(model, cluster, fix=fix, calibration=CALIBRATION, **({"global_batch": 8} | settings))


def loop(model, cluster, *, memory_bytes):
    """(seconds, bytes, layout) of all layouts that fit, as a plain loop finds them."""
    layouts = list(every_layout(model, cluster, batch=8, space=space(**SMALL)))
    layouts += with_fewest_recomputed(model, cluster, layouts, memory_bytes=memory_bytes)
    rows = [(*score, layout) for score, layout in zip(scored(model, cluster, layouts), layouts, strict=True)]
    return [row for row in rows if row[1] <= memory_bytes]


def test_the_first_twenty_are_those_of_a_plain_loop(model):
    cluster = machine(nodes=2, per_node=2, memory_gb=0.072)
    rows = loop(model, cluster, memory_bytes=0.072e9)
    assert len(rows) > 20
    best = sorted(rows, key=lambda row: row[:2])[:20]
    plans = search(model, cluster)
    np.testing.assert_allclose([p.step_time_s for p in plans], [row[0] for row in best], rtol=1e-12)
    np.testing.assert_allclose([p.memory_bytes for p in plans], [row[1] for row in best], rtol=1e-12)
    for place in (0, 7, 19):
        ((time, size),) = scored(model, cluster, [plans[place].layout])
        assert (plans[place].step_time_s, plans[place].memory_bytes) == pytest.approx((time, size), rel=1e-12)


@pytest.mark.parametrize("experts", [0, 4])
def test_layouts_that_need_recomputation_recompute_no_more_layers_than_they_must(experts):
    model, cluster = small_model(experts=experts, seq=1024), machine(nodes=2, per_node=2, memory_gb=0.085)
    rows = sorted(loop(model, cluster, memory_bytes=0.085e9), key=lambda row: row[:2])
    plans = search(model, cluster, top=None)
    assert len(plans) == len(rows) == len({plan.layout for plan in plans})
    np.testing.assert_allclose([p.step_time_s for p in plans], [row[0] for row in rows], rtol=1e-12)
    assert {plan.layout for plan in plans} == {layout for *_, layout in rows}
    assert 10 < sum(plan.layout.recompute_layers > 0 for plan in plans) < len(plans)
    assert sum(plans.rejected.values()) + len(plans.order) == plans.considered
    for top in (1, 12):
        assert [p.layout for p in search(model, cluster, top=top)] == [p.layout for p in plans][:top]


def test_the_front_is_that_of_a_plain_loop(model):
    cluster = machine(nodes=2, per_node=2)
    layouts = list(every_layout(model, cluster, batch=8, space=space(**SMALL)))
    points = set(scored(model, cluster, layouts))
    front = sorted(
        point for point in points
        if not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
    )  # fmt: skip
    frame = search(model, cluster).front
    np.testing.assert_allclose(frame["step_time_s"], [time for time, _ in front], rtol=1e-12)
    np.testing.assert_allclose(frame["memory_bytes"], [size for _, size in front], rtol=1e-12)


MIXES = st.dictionaries(
    st.sampled_from(["time", "dollars", "headroom", "tokens_per_s"]), st.floats(0.05, 5), min_size=1
)


@settings(max_examples=15, deadline=None)
@given(
    objective=st.one_of(st.sampled_from(["time", "dollars", "headroom", "tokens_per_s"]), MIXES),
    layers=st.sampled_from([4, 8, 12]), memory_gb=st.sampled_from([0.07, 0.08, 40.0]), top=st.integers(1, 12),
    fix=st.sampled_from([{}, {"compression": ["none", "fp16", "powersgd"]}]),
)  # fmt: skip
def test_leaving_out_early_changes_no_ranking(objective, layers, memory_gb, top, fix):
    model, cluster = small_model(layers=layers), machine(nodes=2, per_node=2, memory_gb=memory_gb)
    short = search(model, cluster, objective=objective, top=top, fix=fix)
    whole = search(model, cluster, objective=objective, top=None, fix=fix)
    assert [p.layout for p in short] == [p.layout for p in whole][:top]
    assert short.valid == whole.valid


@settings(max_examples=12, deadline=None)
@given(
    link=st.floats(1e8, 1e11), host=st.floats(1e8, 1e11), zero=st.sampled_from([[3], [3, 0], [2, 3]]),
    offload=st.sampled_from([["all"], ["all", "none"], ["states", "activations"]]),
    schedule=st.sampled_from(["1f1b", "zb-h1", "zb-h2", "zbv", "v-half", "v-min"]),
)  # fmt: skip
def test_nor_where_waiting_lengthens_the_bubble_of_every_way_to_hold_states(
    link, host, zero, offload, schedule
):
    cluster = machine(nodes=2, per_node=2, intra=link, inter=link / 8, host_bandwidth=host)
    fix = {"zero": zero, "offload": offload, "schedule": schedule}
    short, whole = (search(small_model(), cluster, top=top, fix=fix) for top in (7, None))
    assert [p.layout for p in short] == [p.layout for p in whole][:7]


@settings(max_examples=12, deadline=None)
@given(
    near=st.floats(1, 20), far=st.floats(1, 20), host=st.floats(1, 20), slow=st.sampled_from([1e9, 25e9]),
    experts=st.sampled_from([0, 4]),
)  # fmt: skip
def test_more_bandwidth_never_slows_the_best_plan(near, far, host, slow, experts):
    model = small_model(experts=experts)
    before = machine(nodes=2, per_node=2, intra=100e9, inter=slow, host_bandwidth=10e9)
    after = machine(nodes=2, per_node=2, intra=near * 100e9, inter=far * slow, host_bandwidth=host * 10e9)
    times = [search(model, cluster, top=1).best.step_time_s for cluster in (before, after)]
    assert times[1] <= times[0] * (1 + 1e-12)


@settings(max_examples=12, deadline=None)
@given(memory=st.floats(0.068, 0.08), more=st.floats(1, 4), host=st.floats(1, 100))
def test_more_memory_never_worsens_the_best_plan(memory, more, host):
    model = small_model()
    before = machine(nodes=2, per_node=2, memory_gb=memory, host=1e6)
    after = machine(nodes=2, per_node=2, memory_gb=memory * more, host=1e6 * host)
    plans = [search(model, cluster, top=1) for cluster in (before, after)]
    if len(plans[0]):
        assert plans[1].best.step_time_s <= plans[0].best.step_time_s
        assert plans[1].by("headroom").best.headroom_bytes >= plans[0].by("headroom").best.headroom_bytes


@settings(max_examples=20, deadline=None)
@given(objective=MIXES)
def test_a_ranking_is_a_permutation_of_what_fits(objective):
    plans = search(
        small_model(), machine(nodes=2, per_node=2, memory_gb=0.072), top=None, fix={"zero": [0, 1]}
    )
    again = plans.by(objective)
    assert sorted(again.order.tolist()) == list(range(len(plans.order)))
    assert set(again.front.index) <= set(range(1, len(again) + 1))


NUMBERS = st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(st.lists(NUMBERS, min_size=1, max_size=60), NUMBERS)
def test_a_staircase_tells_who_is_surely_beaten(points, row):
    beaten = Staircase(np.array(points, float)).beats(*np.array([row], float).T)[0]
    assert beaten == any(time < row[0] and memory <= row[1] for time, memory in points)
