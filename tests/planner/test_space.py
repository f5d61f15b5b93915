"""Every layout that can be is a candidate, once; all others are counted by the reason that keeps them out."""

from __future__ import annotations

from collections import Counter

import pytest

from planner.brute import CALIBRATION, NARROW, every_layout, machine, small_model, space
from shardscope.errors import SpecError
from shardscope.planner import REASONS, SearchAxes, plan


def found(model, cluster, batch, **changes):
    plans = plan(model, cluster, global_batch=batch, top=None, fix=NARROW | changes, calibration=CALIBRATION)
    return plans, [plan.layout for plan in plans]


@pytest.mark.parametrize(
    ("nodes", "per_node", "batch", "experts", "changes"),
    [
        (1, 1, 4, 0, {}),
        (1, 2, 4, 0, {}),
        (1, 6, 12, 0, {"offload": "none", "schedule": ["gpipe", "interleaved", "v-half"]}),
        (2, 4, 8, 0, {"offload": "none", "schedule": ["1f1b", "dualpipev"]}),
        (1, 4, 8, 4, {"offload": "none", "schedule": ["1f1b", "zero-bubble"]}),
        (2, 2, 8, 0, {"offload": "all", "schedule": "1f1b", "compression": ["none", "int8"]}),
    ],
)
def test_the_table_holds_what_nested_loops_find_and_nothing_twice(nodes, per_node, batch, experts, changes):
    model, cluster = small_model(experts=experts), machine(nodes=nodes, per_node=per_node)
    plans, layouts = found(model, cluster, batch, **changes)
    expected = list(every_layout(model, cluster, batch=batch, space=space(**changes)))
    assert Counter(layouts) == Counter(expected)
    assert plans.valid == len(expected)


def test_counts_of_kept_and_rejected_add_up_to_all_combinations():
    for top in (None, 3):
        plans = plan(
            small_model(), machine(memory_gb=0.072), global_batch=8, top=top, calibration=CALIBRATION
        )
        assert sum(plans.rejected.values()) + len(plans.order) == plans.considered
        assert set(plans.rejected) <= set(REASONS)
        assert plans.rejected["does not fit"] > 0


def test_every_plan_passes_the_layouts_own_check(model, cluster):
    _, layouts = found(model, cluster, 8, schedule=["1f1b", "interleaved", "zbv"])
    assert layouts
    for layout in layouts:
        layout.check(model, cluster)
        assert layout.num_devices == cluster.num_devices


def test_a_fixed_axis_is_held(model, cluster):
    _, layouts = found(model, cluster, 8, tensor=2, zero=[1, 2], data=2, recompute="full")
    assert layouts
    assert {(layout.tensor, layout.data, layout.recompute) for layout in layouts} == {(2, 2, "full")}
    assert {layout.zero for layout in layouts} == {1, 2}


def test_numbers_of_recomputed_layers_are_tried_once_each(model, cluster):
    plans, layouts = found(model, cluster, 8, pipeline=[1, 4], schedule="1f1b", recompute_layers=[3, 0, 99])
    assert len(layouts) == len(set(layouts)) == plans.valid
    counts = {(layout.pipeline, layout.recompute, layout.recompute_layers) for layout in layouts}
    assert counts == {
        (1, "none", 0), (1, "full", 0), (1, "full", 3), (4, "none", 0), (4, "full", 0)
    }  # fmt: skip
    assert sum(plans.rejected.values()) + len(plans.order) == plans.considered
    alone = found(model, cluster, 8, pipeline=4, schedule="1f1b", recompute_layers=99)[1]
    assert {(layout.recompute, layout.recompute_layers) for layout in alone} == {("none", 0), ("full", 0)}


@pytest.mark.parametrize(
    ("fix", "told"),
    [
        ({"tensr": 8}, "did you mean 'tensor'"),
        ({"tensor": -2}, "tensor"),
        ({"zero": 4}, "zero"),
        ({"schedule": "2f2b"}, "schedule"),
        ({"offload": []}, "offload"),
    ],
)
def test_what_cannot_be_fixed_is_refused_in_a_sentence(fix, told):
    with pytest.raises(SpecError, match=told) as caught:
        SearchAxes().fixed(fix)
    assert "\n" not in str(caught.value)
