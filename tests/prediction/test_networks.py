"""Predictions and simulations on emulated clusters whose links are shared or unequal: racks, slow or full nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardscope as ss
from shardscope.analytic.communication.network import Network
from shardscope.prediction.job import JobPrediction
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.cluster.emulated import PAYLOAD

FAST, SLOW = 2.5e6 * PAYLOAD, 0.25 * 2.5e6 * PAYLOAD
RACKS: dict[str, Any] = {"racks": 2, "rack_bandwidth": "5 Mbit/s"}


def cluster_of(nodes: int = 4, **fields: Any) -> EmulatedCluster:
    return ss.Cluster.emulated(nodes, "20 Mbit/s", flops="1 GFLOP/s", memory_bandwidth="1 GB/s", **fields)


def job_of(strategy: Any = "ring", world_size: int = 4, **changes: Any) -> ss.Job:
    """A job whose gradients take far longer on these links than its messages' fixed times."""
    return ss.Job(
        model="mlp", data="digits", strategy=strategy, world_size=world_size, batch=4 * world_size, **changes
    )


def gradient_bytes() -> int:
    return 4 * ss.predict(job_of()).step.num_elements


def communication(found: Any) -> float:
    return float(found.time["communication"].value)


def wire_seconds(prediction: JobPrediction) -> float:
    """Predicted time on the links, as stated, without messages' fixed times and the links' efficiency."""
    assert prediction.host is not None
    share = prediction.host.value("link_efficiency", transport="network")
    parts = prediction.time["communication"].parts
    fixed = sum(
        part.inputs["messages"] * prediction.rates.per_message_s(part.name, prediction.traffic[part.name])
        for part in parts
    )
    return share * (communication(prediction) - fixed)


class TestNetwork:
    def test_a_message_between_racks_takes_both_uplinks_and_one_within_a_node_none(self) -> None:
        network = Network.of(cluster_of(per_node=2, **RACKS), memory=1e9)
        ways = network.ways(np.array([0, 0, 0]), np.array([1, 2, 7]))
        named = [[network.names[link] for link in row if link >= 0] for row in ways.tolist()]
        assert named == [
            ["rank 0, out", "rank 1, in"],
            ["node 0, out", "node 1, in"],
            ["node 0, out", "rack 0, out", "rack 1, in", "node 3, in"],
        ]

    def test_links_have_the_rates_of_the_cluster_less_headers(self) -> None:
        cluster = cluster_of(node_bandwidth={1: "5 Mbit/s"}, upload={2: "2 Mbit/s"})
        network = Network.of(cluster, efficiency=0.5)
        capacity = dict(zip(network.names, network.capacity.tolist(), strict=True))
        assert capacity["node 0, out"] == pytest.approx(FAST / 2)
        assert capacity["node 1, in"] == pytest.approx(SLOW / 2)
        assert capacity["node 2, out"] == pytest.approx(0.1 * FAST / 2)
        assert capacity["node 2, in"] == pytest.approx(FAST / 2)

    def test_equal_links_of_single_ranks_are_predicted_without_it(self) -> None:
        assert ss.predict(job_of(), cluster_of()).rates.network is None
        assert ss.predict(job_of(), cluster_of(nodes=1, per_node=4)).rates.network is None
        assert ss.predict(job_of(), cluster_of(nodes=2, per_node=2)).rates.network is not None


class TestRacks:
    """S bytes of gradients on two racks of two nodes, whose uplinks have a quarter of a node's rate."""

    @pytest.mark.parametrize(
        ("strategy", "by_uplink", "by_node"),
        [
            ("ring", 1.5, 0.0),  # 2(W-1)/W S crosses each uplink
            (
                ss.Hierarchical(per_node=2),
                1.0,
                1.0,
            ),  # half of S, out of both nodes of a rack, and S inside racks
            ("parameter-server", 4.0, 0.0),  # two workers of the other rack push and pull S
            (
                ss.Gossip(measure_every=1000),
                2.0,
                0.0,
            ),  # both nodes of a rack send S to a neighbour in the other
        ],
        ids=["ring", "hierarchical", "server", "gossip"],
    )
    def test_flows_share_an_uplink(self, strategy: Any, by_uplink: float, by_node: float) -> None:
        found = ss.predict(job_of(strategy), cluster_of(**RACKS))
        seconds = gradient_bytes() * (by_uplink / SLOW + by_node / FAST)
        assert wire_seconds(found) == pytest.approx(seconds, rel=0.01)

    @pytest.mark.parametrize(
        "strategy",
        ["ring", "ring:2", ss.Hierarchical(per_node=2), "parameter-server", "zero-3", "gossip"],
        ids=str,
    )
    @pytest.mark.parametrize(
        "network",
        [RACKS, {"node_bandwidth": {3: "5 Mbit/s"}}, {"upload": {1: "5 Mbit/s"}}],
        ids=["racks", "slow node", "slow upload"],
    )
    def test_the_simulation_agrees_with_the_closed_form(self, strategy: Any, network: dict[str, Any]) -> None:
        job, cluster = job_of(strategy), cluster_of(**network)
        predicted, simulated = ss.predict(job, cluster), ss.simulate(job, cluster)
        assert simulated.step_time_s == pytest.approx(predicted.step_time_s, rel=0.02)

    @pytest.mark.parametrize("slice_mb", [1.0, 0.04, 0.005])
    def test_a_tree_adds_up_its_levels_and_says_so(self, slice_mb: float) -> None:
        job, cluster = job_of(ss.Tree(slice_mb=slice_mb)), cluster_of(**RACKS)
        predicted, simulated = ss.predict(job, cluster), ss.simulate(job, cluster)
        assert simulated.step_time_s == pytest.approx(predicted.step_time_s, rel=0.05)
        (told,) = predicted.assumptions
        assert told.startswith("The levels of tree_all_reduce are limited by different links")
        assert told in repr(predicted)
        assert predicted.to_dict()["assumptions"] == [told]

    def test_a_tree_without_slices_takes_its_levels_one_after_another(self) -> None:
        """Ranks 2 and 3 send up together, then rank 1; then rank 0 sends down, and rank 1 after it has received."""
        found = ss.predict(job_of("tree"), cluster_of(**RACKS))
        assert wire_seconds(found) == pytest.approx(gradient_bytes() * (4 / SLOW + 1 / FAST), rel=0.01)

    def test_messages_of_the_backend_are_assumed_to_go_to_the_next_rank(self) -> None:
        predicted = ss.predict(job_of("all-reduce"), cluster_of(**RACKS))
        assert "The messages of all_reduce are not known one by one" in predicted.assumptions[0]
        assert ss.predict(job_of("all-reduce"), cluster_of()).assumptions == ()

    def test_a_tree_beats_a_ring_where_a_leaf_has_a_slow_link(self) -> None:
        """A leaf sends and receives S once, at the same time; in a ring, every rank does so 2(W-1)/W times."""
        slow = cluster_of(node_bandwidth={3: "2 Mbit/s"})
        tree, ring = (ss.predict(job_of(name), slow) for name in (ss.Tree(slice_mb=0.005), "ring"))
        assert communication(tree) < 0.85 * communication(ring)
        tree, ring = (ss.predict(job_of(name), cluster_of()) for name in (ss.Tree(slice_mb=0.005), "ring"))
        assert communication(tree) > communication(ring)

    def test_uplinks_as_fast_as_all_nodes_of_a_rack_change_nothing(self) -> None:
        wide = cluster_of(racks=2, rack_bandwidth="40 Mbit/s")
        for strategy in ("ring", "parameter-server", "zero-3"):
            with_racks, without = (
                ss.predict(job_of(strategy), wide),
                ss.predict(job_of(strategy), cluster_of()),
            )
            assert with_racks.step_time_s == pytest.approx(without.step_time_s, rel=2e-3)

    def test_ranks_of_a_node_share_its_link(self) -> None:
        """The second ring has one message across, the parameter server of the first node two."""
        cluster = cluster_of(nodes=2, per_node=2)
        for strategy, crossing in (("parameter-server", 4), ("ring", 1.5)):
            seconds = crossing * gradient_bytes() / FAST
            assert wire_seconds(ss.predict(job_of(strategy), cluster)) == pytest.approx(seconds, rel=0.01)

    @pytest.mark.parametrize("tensor", [1, 2])
    def test_replicas_of_shards_send_to_the_rank_with_the_same_shard(self, tensor: int) -> None:
        """Each node has a replica of two shards, so all of its ranks send their shares of the gradient across."""
        layout = ss.Layout(data=4, tensor=tensor, zero=2, shard=2, global_batch=16)
        job = ss.Job(model="gpt-nano", data="python-source", layout=layout)
        found = ss.predict(job, cluster_of(nodes=2, per_node=2 * tensor))
        assert found.time is not None
        assert found.traffic is not None
        name = "all_reduce" if tensor == 1 else "data:all_reduce"
        assert found.time[name].inputs["bytes"] == found.traffic[name].bytes[: 2 * tensor].sum()

    def test_stages_of_a_pipeline_that_are_in_different_racks_send_over_the_uplinks(self) -> None:
        strategy = ss.Pipeline(split="even")
        job = job_of(strategy).replace(batch=ss.Batch(16, micro_batch=4))
        terms = [ss.predict(job, cluster_of(**network)).time["send"] for network in ({}, RACKS)]
        assert terms[1].value > terms[0].value
        assert "rack" in terms[1].source


def test_the_interval_contains_what_the_links_state() -> None:
    found = ss.predict(job_of(), cluster_of(**RACKS))
    assert found.interval is not None
    assert found.interval.low < found.step_time_s < found.interval.high
    slow = ss.predict(job_of(), cluster_of(racks=2, rack_bandwidth="0.5 Mbit/s"))
    assert slow.interval is not None
    assert slow.interval.low > 0.9 * slow.step_time_s


class TestDependentMessages:
    """Levels and latencies of messages that wait for each other, on equal links, too."""

    @pytest.mark.parametrize("strategy", [ss.Tree(), "ring", "parameter-server", "zero-3"], ids=str)
    @pytest.mark.parametrize("latency", ["0 s", "20 ms"])
    def test_the_simulation_agrees_on_equal_links(self, strategy: Any, latency: str) -> None:
        job, cluster = job_of(strategy), cluster_of(latency=latency)
        predicted, simulated = ss.predict(job, cluster), ss.simulate(job, cluster)
        assert simulated.step_time_s == pytest.approx(predicted.step_time_s, rel=0.01)

    def test_a_cluster_with_one_faster_node_is_no_slower(self) -> None:
        """Levels of a tree are added on equal links as on others, and said to be."""
        even = ss.predict(job_of("tree"), cluster_of())
        faster = ss.predict(job_of("tree"), cluster_of(node_bandwidth={3: "20.1 Mbit/s"}))
        assert faster.step_time_s == pytest.approx(even.step_time_s, rel=1e-3)
        assert even.assumptions == faster.assumptions != ()

    @pytest.mark.parametrize(
        ("strategy", "hops"),
        [("ring", 6), ("tree", 4), ("parameter-server", 2), (ss.Gossip(measure_every=1000), 1)],
        ids=["ring", "tree", "server", "gossip"],
    )
    @pytest.mark.parametrize("fields", [{}, RACKS], ids=["equal", "racks"])
    def test_the_latency_counts_once_for_each_hop(
        self, strategy: Any, hops: int, fields: dict[str, Any]
    ) -> None:
        """Messages that do not wait for each other are on their way at the same time."""
        without, late = (
            ss.predict(job_of(strategy), cluster_of(latency=latency, **fields)) for latency in ("0 s", "1 s")
        )
        assert late.step_time_s - without.step_time_s == pytest.approx(hops, rel=1e-6)

    def test_only_servers_update(self) -> None:
        """A slow worker does not slow down an update that the server runs."""
        rates = {0: "100 MB/s", 1: "100 MB/s", 2: "100 MB/s", 3: "20 MB/s"}
        cluster = ss.Cluster.emulated(4, "20 Mbit/s", flops="1 GFLOP/s", node_memory_bandwidth=rates)
        even = ss.Cluster.emulated(4, "20 Mbit/s", flops="1 GFLOP/s", memory_bandwidth="100 MB/s")
        server, ring = (job_of(name) for name in ("parameter-server", "ring"))
        updates = [
            ss.predict(job, at).time["optimizer"].value for job in (server, ring) for at in (even, cluster)
        ]
        assert updates[1] == pytest.approx(updates[0])
        assert updates[3] == pytest.approx(5 * updates[2])

    @pytest.mark.parametrize("strategy", ["tree", "parameter-server"])
    def test_few_messages_of_many_ranks_are_listed(self, strategy: str) -> None:
        times = [
            communication(ss.predict(job_of(strategy, world_size), cluster_of(world_size, **RACKS)))
            for world_size in (64, 66)
        ]
        assert times[1] == pytest.approx(times[0], rel=0.05)

    def test_a_limit_of_messages_is_named(self) -> None:
        (told,) = ss.predict(job_of("zero-3", 80), cluster_of(80, **RACKS)).assumptions
        assert "too many to list one by one" in told
        assert "may be far too short" in told

    def test_chunks_that_differ_by_an_element_are_no_bound(self) -> None:
        assert ss.predict(job_of(), cluster_of(node_bandwidth={3: "5 Mbit/s"})).assumptions == ()
