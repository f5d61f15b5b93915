"""Groups of ranks on nodes, against ranks numbered and looked up one by one."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.analytic import communication as comm
from shardscope.analytic.communication.ring import is_inside_node, members_per_node
from shardscope.errors import SpecError
from shardscope.spec.cluster import Cluster, Device, Link

DEVICE = Device(
    name="d", memory_bytes=80e9, peak_flops={"bf16": 1e15}, memory_bandwidth=2e12, source="made up"
)
INTRA = Link(name="in", bandwidth=300e9, latency_s=3e-6, source="made up")
INTER = Link(name="out", bandwidth=25e9, latency_s=5e-6, source="made up")
POWERS = st.integers(0, 6).map(lambda k: 2**k)


def cluster(nodes: int = 16, per_node: int = 8) -> Cluster:
    return Cluster(name="c", device=DEVICE, nodes=nodes, per_node=per_node, intra=INTRA, inter=INTER)


@given(POWERS, POWERS, st.sampled_from([1, 2, 4, 6, 8]))
def test_a_group_is_inside_a_node_exactly_if_all_its_ranks_are(
    group: int, stride: int, per_node: int
) -> None:
    machine = cluster(nodes=6 * group * stride, per_node=per_node)
    block = group * stride
    nodes_of = [
        {(first + k * stride) // per_node for k in range(group)}
        for start in range(0, machine.num_devices // block * block, block)
        for first in range(start, start + stride)
    ]
    assert bool(is_inside_node(machine, group, stride)) == all(len(nodes) == 1 for nodes in nodes_of)


@given(POWERS, POWERS)
def test_the_members_a_node_are_those_one_counts(group: int, stride: int) -> None:
    ranks = np.arange(group) * stride
    assert members_per_node(cluster(), group, stride) == np.unique(ranks // 8, return_counts=True)[1].max()


@pytest.mark.parametrize(
    ("group", "stride", "bandwidth", "latency"),
    [
        (8, 1, 300e9, 3e-6),  # tensor parallel within a node
        (16, 8, 25e9, 5e-6),  # replicas of whole nodes: one card each
        (128, 1, 200e9, 5e-6),  # all ranks: eight cards a node
        (16, 4, 50e9, 5e-6),  # two ranks a node
        (1, 64, 300e9, 3e-6),  # nobody to talk to
        (2, 4, 300e9, 3e-6),
    ],
)
def test_a_group_has_the_link_that_it_spans(
    group: int, stride: int, bandwidth: float, latency: float
) -> None:
    assert comm.spanning_link(cluster(), group, stride) == (bandwidth, latency)


def test_rings_through_many_cards_are_no_faster_than_inside() -> None:
    machine = cluster().model_copy(update={"inter": INTER.model_copy(update={"bandwidth": 100e9})})
    assert comm.spanning_link(machine, 128, 1).bandwidth == INTRA.bandwidth


def test_one_node_has_one_link_whatever_the_shape() -> None:
    assert comm.spanning_link(cluster(nodes=1, per_node=6), 4, 1) == (300e9, 3e-6)


def test_axes_are_nested_with_tensor_innermost() -> None:
    strides = comm.group_strides(tensor=[1, 8], context=2, data=4)
    assert strides.tensor.tolist() == [1, 1]
    assert strides.context.tolist() == [1, 8]
    assert strides.data.tolist() == [2, 16]
    assert strides.pipeline.tolist() == [8, 64]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("all_reduce", 2 * (3 * 1e-6 + 0.75 * 1e9 / 1e10)),
        ("reduce_scatter", 3 * 1e-6 + 0.75 * 1e9 / 1e10),
        ("all_gather", 3 * 1e-6 + 0.75 * 1e9 / 1e10),
        ("all_to_all", 3 * 1e-6 + 0.75 * 1e9 / 1e10),
        ("send_recv", 1e-6 + 0.1),
    ],
)
def test_the_ring_takes_what_papers_say_and_nothing_alone(op: str, expected: float) -> None:
    assert comm.ring_time(op, 1e9, 4, 1e10, 1e-6) == pytest.approx(expected)
    assert comm.ring_time(op, 1e9, 1, 1e10, 1e-6) == 0


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(SpecError, match="op='all_redcue' is not known; did you mean 'all_reduce'"):
        comm.ring_time("all_redcue", 1, 2, 1, 0)


def test_a_million_groups_are_timed_in_a_blink() -> None:
    rng = np.random.default_rng(0)
    group, stride = 2 ** rng.integers(0, 8, (2, 1_000_000))

    def took_s() -> float:
        start = time.process_time()  # other programs take no part in it
        comm.ring_time("all_reduce", 1e9, group, *comm.spanning_link(cluster(), group, stride))
        return time.process_time() - start

    assert any(took_s() < 0.25 for _ in range(50))


@given(st.floats(0, 1e3), st.floats(0, 1e3))
def test_only_what_is_not_hidden_is_exposed(communication: float, hidden: float) -> None:
    exposed = comm.exposed_time(communication, hidden)
    assert exposed >= 0
    assert exposed + min(communication, hidden) == pytest.approx(communication)
