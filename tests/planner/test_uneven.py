"""Mixed clusters: the cut of the layers is the best there is, by trying all of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from planner.brute import CALIBRATION, machine, small_model
from shardscope.planner import plan
from shardscope.prediction.predict import predict
from shardscope.prediction.step.step import least_pace
from shardscope.spec.cluster import Cluster

FIX = {
    "offload": "none",
    "schedule": ["1f1b", "zb-h1"],
    "zero": [0, 1],
    "recompute": "none",
    "pipeline": [2, 4],
}


def group(nodes, *, speed=1.0, memory_gb=16.0):
    base = machine(nodes=nodes, per_node=4, memory_gb=memory_gb)
    peaks = {name: speed * peak for name, peak in base.device.peak_flops.items()}
    return base.replace(device=base.device.replace(peak_flops=peaks, memory_bandwidth=speed * 2e12))


def search(*groups, **settings):
    cluster = Cluster.mixed(*groups) if len(groups) > 1 else groups[0]
    model = small_model(layers=8, hidden=2048, heads=16, seq=1024)
    return plan(model, cluster, global_batch=32, fix=FIX, calibration=CALIBRATION, **settings)


@given(
    layers=st.integers(2, 9), times=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    stages=st.tuples(st.integers(1, 2), st.integers(1, 2)), most=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)  # fmt: skip
def test_the_pace_is_that_of_the_best_of_all_cuts(layers, times, stages, most):
    ranks = [which for which in (0, 1) for _ in range(stages[which])]
    paces = [
        max(count * times[which] for count, which in zip(counts, ranks, strict=True))
        for counts in product(range(1, layers + 1), repeat=len(ranks))
        if sum(counts) == layers and all(c <= most[w] for c, w in zip(counts, ranks, strict=True))
    ]
    if paces:
        columns = (np.array([pair], float) for pair in (times, stages, most))
        assert least_pace(layers, *columns)[0] == pytest.approx(min(paces), rel=1e-9)


def test_equal_groups_are_one_cluster():
    together, apart = search(group(2)), search(group(1), group(1))
    assert [row.layout for row in apart] == [row.layout for row in together]
    np.testing.assert_allclose([r.step_time_s for r in apart], [r.step_time_s for r in together], rtol=1e-9)
    assert len(set(apart.stage_layers())) == 1


def test_faster_devices_get_more_layers_and_the_step_gets_shorter():
    slow, mixed = search(group(2)), search(group(1), group(1, speed=3.0))
    assert mixed.best.step_time_s < 0.9 * slow.best.step_time_s
    counts = mixed.stage_layers()
    assert sum(counts) == 8
    assert len(counts) == mixed.best.layout.pipeline
    half = len(counts) // 2
    assert sum(counts[half:]) > sum(counts[:half]) > 0


def test_a_faster_group_never_slows_the_best_plan():
    times = [search(group(1), group(1, speed=speed)).best.step_time_s for speed in (1.0, 1.3, 2.0, 5.0)]
    assert times == sorted(times, reverse=True)


def test_the_terms_of_an_uneven_plan_add_up_to_its_time():
    mixed = search(group(1), group(1, speed=3.0))
    told = mixed.explain(1, 2)
    assert told.time == (pytest.approx(mixed[0].step_time_s), pytest.approx(mixed[1].step_time_s))
    assert told.term.value == pytest.approx(mixed[1].step_time_s - mixed[0].step_time_s)


def test_a_prediction_cuts_the_layers_as_the_planner_does():
    mixed = search(group(1), group(1, speed=3.0))
    for row in mixed:
        found = predict(mixed.setting.model, mixed.setting.cluster, row.layout, CALIBRATION)
        assert found.step_time_s == pytest.approx(row.step_time_s, rel=1e-12)
        assert found.peak_bytes == pytest.approx(row.memory_bytes, rel=1e-12)
    assert found.time["forward"].inputs["pace"] <= 1
    best = predict(mixed.setting.model, mixed.setting.cluster, mixed.best.layout, CALIBRATION)
    assert 0 < best.time["forward"].inputs["pace"] < 1


@pytest.mark.parametrize("layers", [8, 9, 12])
def test_every_stage_has_a_layer_however_slow_its_device(layers):
    slow, fast = (ss.Cluster.of(name, nodes=4, per_node=1) for name in ("v100-32gb", "h100"))
    fix = {"tensor": 1, "context": 1, "expert": 1, "data": 1}
    model = ss.Model.of("gpt2-large").replace(layers=layers)
    counts = ss.plan(model, ss.Cluster.mixed(slow, fast), global_batch=16, fix=fix).stage_layers()
    assert len(counts) == 8
    assert sum(counts) == layers
    assert min(counts) >= 1
