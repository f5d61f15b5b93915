"""The description of an emulated cluster: what it refuses, what it is called, and what its commands say."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from shardscope.prediction.loads import slowness_on, update_slowness_on
from shardscope.runtime.emulated.commands import FRAME, bucket, network_plan, segment_bytes
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.cluster.emulated import PAYLOAD
from shardscope.training.emulation import Emulation


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"nodes": 0}, "nodes=0 is not valid: give a whole number from 1 to 100"),
        ({"nodes": 101}, "nodes=101"),
        ({"nodes": True}, "nodes=True"),
        ({"bandwidth": "1"}, "unit"),
        ({"bandwidth": 0}, "bandwidth=0 is not valid: it should be greater than 0"),
        ({"upload": {1: 0}}, "upload=0 is not valid"),
        ({"latency": "1 MB"}, "latency"),
        ({"per_node": 0}, "per_node=0"),
        ({"slowdown": {4: 2.0}}, "slowdown names node 4, but the nodes are 0 to 3"),
        ({"slowdown": {1: 0.5}}, "slowdown=0.5"),
        ({"flops": "2 GHz"}, "flops"),
        ({"memory_bandwidth": "1 GB/s"}, "memory_bandwidth='1 GB/s' has no effect without flops"),
        ({"upload": {"1": "1 Gbit/s"}}, "upload names node '1'"),
        ({"node_flops": {0: "1 GFLOP/s"}}, "node_flops does not name node 1; name every node, or give flops"),
        ({"node_memory": {5: "1 GB"}, "memory": "1 GB"}, "node_memory names node 5"),
        ({"node_memory_bandwidth": dict.fromkeys(range(4), "1 GB/s")}, "has no effect without flops"),
        ({"racks": 3, "rack_bandwidth": "1 Gbit/s"}, "racks=3 does not divide nodes=4"),
        ({"racks": 2}, "racks=2 needs a rack_bandwidth"),
        ({"rack_bandwidth": "1 Gbit/s"}, "racks=1 does not take a rack_bandwidth"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ss.SpecError) as refused:
        ss.Cluster.emulated(**fields)
    assert told in str(refused.value)


def test_uneven_links_are_those_of_the_named_nodes() -> None:
    cluster = ss.Cluster.emulated(
        nodes=3, bandwidth="1 Gbit/s", node_bandwidth={1: "100 Mbit/s"}, upload={2: "10 Mbit/s"}
    )
    assert [node.upload for node in cluster.nodes] == [1.25e8, 1.25e7, 1.25e6]
    assert [node.download for node in cluster.nodes] == [1.25e8, 1.25e7, 1.25e8]
    assert cluster.slowest == 1.25e6
    assert cluster.link is not None
    assert cluster.link.bandwidth == pytest.approx(1.25e6 * PAYLOAD)
    assert cluster.name == "3 emulated nodes, slowest link 10 Mbit/s"


def test_racks_and_their_uplinks_are_named() -> None:
    cluster = ss.Cluster.emulated(nodes=4, racks=2, rack_bandwidth="250 Mbit/s")
    assert cluster.name == "4 emulated nodes in 2 racks, 1 Gbit/s, uplinks 250 Mbit/s"
    assert not cluster.has_equal_links


def test_a_single_node_has_no_link_to_other_nodes() -> None:
    cluster = ss.Cluster.emulated(nodes=1, per_node=4, latency="1 ms")
    assert cluster.link is None
    assert cluster.name == "1 emulated node of 4 ranks"


def test_its_speed_is_that_of_the_slowest_node() -> None:
    cluster = ss.Cluster.emulated(nodes=2, flops="3 GFLOP/s", memory_bandwidth="6 GB/s", slowdown={1: 2.0})
    assert (cluster.flops, cluster.memory_bandwidth) == (1.5e9, 3e9)
    assert cluster.name == "2 emulated nodes, 1 Gbit/s, slowest node 1.5 GFLOP/s"
    assert ss.Cluster.emulated(slowdown={0: 2.0}).flops is None


def test_different_nodes_have_rates_and_memory_of_their_own() -> None:
    cluster = ss.Cluster.emulated(
        nodes=3, flops="1 GFLOP/s", node_flops={0: "4 GFLOP/s"}, slowdown={1: 2.0}, memory_bandwidth="2 GB/s",
        node_memory_bandwidth={0: "3 GB/s"}, memory="1 GB", node_memory={0: "4 GB"}, per_node=2,
    )  # fmt: skip
    assert [node.rate for node in cluster.nodes] == [4e9, 0.5e9, 1e9]
    assert [node.update_rate for node in cluster.nodes] == [3e9, 1e9, 2e9]
    assert cluster.stated_memory() == (4e9, 4e9, 1e9, 1e9, 1e9, 1e9)
    assert cluster.flops == 0.5e9
    assert slowness_on(cluster) == (0.125, 0.125, 1.0, 1.0, 0.5, 0.5)
    assert update_slowness_on(cluster) == (1 / 3, 1 / 3, 1.0, 1.0, 0.5, 0.5)
    note = Emulation(cluster, 0, delays_in_kernel=True).described()["note"]
    assert note == (
        "computation is emulated, by sleeping: 4 GFLOP/s per rank on node 0, 1 GFLOP/s per rank on nodes 1 and 2, "
        "updates at 3 GB/s on node 0, updates at 2 GB/s on nodes 1 and 2, 2 times as long on node 1"
    )


def test_it_survives_json() -> None:
    cluster = ss.Cluster.emulated(
        nodes=4,
        latency="2 ms",
        per_node=2,
        slowdown={3: 2.5},
        flops="1 GFLOP/s",
        racks=2,
        rack_bandwidth="1 Gbit/s",
    )
    assert EmulatedCluster.from_json(cluster.to_json()) == cluster
    assert cluster.num_devices == 8
    assert [cluster.rack_of(node) for node in range(4)] == [0, 0, 1, 1]


def test_addresses_sort_as_text_in_node_order() -> None:
    addresses = [EmulatedCluster.address(node) for node in range(100)]
    assert addresses == sorted(addresses)
    assert len(set(addresses)) == 100


def test_a_bucket_lets_pass_what_an_ethernet_link_would() -> None:
    """Of 1538 bytes on the wire, the kernel counts 1514."""
    assert bucket(1.25e8).startswith(f"tbf rate {round(1e9 * 1514 / 1538)}bit burst ")
    assert " burst 5000b " in bucket(1.25e6), "at least three frames, or the bucket lets none pass"


@pytest.mark.parametrize("bytes_per_s", [1.25e5, 1.25e6, 1.25e7, 1.25e8, 1.25e9])
def test_a_bucket_holds_a_whole_segment(bytes_per_s: float) -> None:
    """The kernel cuts larger ones into frames, which takes time on the cores that all nodes share."""
    frames = -(-segment_bytes(bytes_per_s) // 1448)
    burst = int(bucket(bytes_per_s).split("burst ")[1].split("b ")[0])
    assert burst >= frames * FRAME


def test_latency_is_added_where_packets_leave_the_switch() -> None:
    plan = network_plan(ss.Cluster.emulated(nodes=2, latency="1.5 ms"))
    assert plan["delays"]
    assert plan["delayed"][0].startswith("qdisc add dev n0 root handle 1: netem delay 1500us ")
    assert plan["delayed"][1].startswith("qdisc add dev n0 parent 1:1 handle 10: tbf ")
    assert not any("netem" in line for node in plan["nodes"] for line in node["tc"])
    assert not network_plan(ss.Cluster.emulated(nodes=2))["delays"]


def test_racks_are_joined_by_limited_links() -> None:
    plan = network_plan(ss.Cluster.emulated(nodes=4, racks=2, rack_bandwidth="100 Mbit/s"))
    assert plan["ports"] == [f"link set n{node} master rack{node // 2} up" for node in range(4)]
    limited = {line.split()[3] for line in plan["limited"]}
    assert limited == {"up0", "down0", "up1", "down1", "n0", "n1", "n2", "n3"}
