"""The devices of a plan: which of them form a group, and over which link."""

from __future__ import annotations

import numpy as np
import pytest

from shardscope.errors import SpecError
from shardscope.planner import plan
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope_widgets import Planner, figures
from shardscope_widgets.figures import _plan_mesh

CLUSTER = Cluster.of("h100-80gb", nodes=4, per_node=8)
LAYOUT = Layout(tensor=4, data=2, pipeline=4, global_batch=8)


def groups(info, axis):
    return next(each for each in info.groups if each.axis == axis)


def drawn(info, field="text"):
    return [text for row in _plan_mesh.mesh(info)["data"][0][field] for text in row if text]


def test_ranks_are_numbered_along_tensor_then_data_then_stages():
    info = _plan_mesh.mesh_info(CLUSTER, LAYOUT)
    assert info.by == "tensor"
    assert list(groups(info, "tensor").members(13)) == [12, 13, 14, 15]
    assert list(groups(info, "data").members(13)) == [9, 13]
    assert list(groups(info, "pipeline").members(13)) == [5, 13, 21, 29]


def test_each_kind_of_group_names_its_link_as_predictions_take_it():
    text = _plan_mesh.plan_mesh_text(_plan_mesh.mesh_info(CLUSTER, LAYOUT))
    assert "Tensor groups of 4 communicate over nvlink-4 within a node (450 GB/s)." in text
    assert "The 4 pipeline stages communicate over infiniband-ndr between nodes (50 GB/s)." in text
    wide = _plan_mesh.plan_mesh_text(_plan_mesh.mesh_info(CLUSTER, Layout(tensor=4, data=8, global_batch=8)))
    assert (
        "Data groups of 8 communicate over infiniband-ndr between nodes (100 GB/s)." in wide
    )  # two ranks of a node, two ports


@pytest.mark.parametrize("by", ["tensor", "data", "pipeline"])
def test_numbers_and_colours_are_those_of_the_groups(by):
    info = _plan_mesh.mesh_info(CLUSTER, LAYOUT, by=by)
    members = groups(info, by)
    place = {"tensor": lambda d: d // 4, "data": lambda d: d // 8 * 4 + d % 4, "pipeline": lambda d: d // 8}[
        by
    ]
    assert members.of(np.arange(32)).tolist() == [place(device) for device in range(32)]
    assert sorted(map(int, drawn(info))) == sorted(map(place, range(32)))


def test_hovering_says_where_a_device_is_and_what_it_does():
    told = drawn(_plan_mesh.mesh_info(CLUSTER, LAYOUT), "hovertext")
    assert len(told) == 32
    (one,) = [text for text in told if text.startswith("<b>device 13</b>")]
    assert "node 1" in one
    assert "tensor rank 1 of 4, with 12–15: nvlink-4 within a node" in one
    assert "stage 1 of 4, sends to device 21: infiniband-ndr between nodes" in one


def test_a_stage_that_goes_on_in_the_same_node_uses_the_link_inside():
    info = _plan_mesh.mesh_info(
        Cluster.of("h100-80gb", nodes=2), Layout(tensor=4, pipeline=4, global_batch=8)
    )
    near, far = (
        next(text for text in drawn(info, "hovertext") if text.startswith(f"<b>device {device}<"))
        for device in (0, 4)
    )
    assert "sends to device 4: nvlink-4 within a node" in near
    assert "sends to device 8: infiniband-ndr between nodes" in far


@pytest.mark.parametrize(
    ("nodes", "squares", "named"), [(64, 512, "device"), (128, 128, "node"), (2048, 512, "nodes")]
)
def test_many_devices_share_a_square(nodes, squares, named):
    layout = Layout(tensor=8, data=nodes // 8, pipeline=8, global_batch=nodes)
    info = _plan_mesh.mesh_info(Cluster.of("h100-80gb", nodes=nodes), layout, by="pipeline")
    told = drawn(info, "hovertext")
    assert len(told) == squares
    assert len(set(drawn(info))) == 8
    assert named in _plan_mesh.mesh_key(info)
    titles = [each["text"] for each in _plan_mesh.mesh(info)["layout"]["annotations"]]
    assert titles[0] == ("node 0" if nodes == 64 else "stage 0")


def test_nodes_of_different_sizes_are_blocks_of_their_own():
    mixed = Cluster.mixed(Cluster.of("h100-80gb", nodes=1), Cluster.of("a100-80gb", nodes=1, per_node=4))
    info = _plan_mesh.mesh_info(mixed, Layout(tensor=4, pipeline=3, global_batch=8))
    assert info.nodes == (8, 4)
    assert len(drawn(info, "hovertext")) == 12


def test_one_device_has_no_groups():
    info = _plan_mesh.mesh_info(Cluster.of("h100-80gb", nodes=1, per_node=1), Layout(global_batch=8))
    assert _plan_mesh.plan_mesh_text(info) == "The whole model is on one device."
    assert len(drawn(info, "hovertext")) == 1


def test_the_figure_takes_plans_and_refuses_an_unknown_axis():
    found = plan("gpt2", CLUSTER, global_batch=64, software="megatron-core")
    assert figures.plan_mesh(found).data[0].type == "heatmap"
    assert figures.caption(figures.plan_mesh, found, 2) == _plan_mesh.plan_mesh_text(
        figures.info(figures.plan_mesh, found, 2)
    )
    with pytest.raises(SpecError, match="by"):
        figures.plan_mesh(found, by="tensr")


@pytest.mark.parametrize("rank", [0, 10**6])
def test_a_plan_that_does_not_exist_is_neither_drawn_nor_measured_nor_trained(rank):
    planner = Planner("gpt2", nodes=1, global_batch=8)
    for use in (
        lambda: figures.plan_mesh(planner.plans, rank),
        lambda: figures.plan_terms(planner.plans, rank),
        lambda: planner.measure(1.0, rank=rank),
        lambda: planner.train(rank=rank),
    ):
        with pytest.raises(SpecError, match=rf"rank={rank} is not a position in the ranking; use 1 to \d+"):
            use()
    planner.close()
