"""Clusters from the catalogue, from the user's own figures, and of unequal nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.errors import SpecError
from shardscope.spec import catalogue
from shardscope.spec.cluster import Cluster, Device, Link

NAMES = st.sampled_from(Cluster.names())


def test_a_device_brings_the_links_of_its_usual_node() -> None:
    cluster = ss.Cluster.of("a100-80gb", nodes=128, per_node=8)
    assert cluster.num_devices == 1024
    assert cluster.intra == Link.of("nvlink-3")
    assert cluster.inter == Link.of("infiniband-hdr")
    assert cluster.inter.bandwidth == 25e9
    assert cluster.name == "128 x 8 a100-80gb"


@pytest.mark.parametrize(
    ("node", "device", "per_node", "gbit_a_device"),
    [("dgx-1v", "v100-32gb", 8, 50), ("dgx-a100", "a100-80gb", 8, 200), ("dgx-h100", "h100-80gb", 8, 400),
     ("p4d.24xlarge", "a100-40gb", 8, 50), ("p5", "h100-80gb", 8, 400), ("p5en", "h200", 8, 400),
     ("p3.16xlarge", "v100-16gb", 8, 25 / 8), ("alps-gh200", "gh200-96gb", 4, 200),
     ("trn2.48xlarge", "trainium2", 16, 200),
     ("gb200-nvl72", "gb200", 72, 400)],
)  # fmt: skip
def test_a_node_shares_its_ports_among_its_devices(
    node: str, device: str, per_node: int, gbit_a_device: float
) -> None:
    cluster = Cluster.of(node, nodes=2)
    assert cluster.device.name == device
    assert cluster.per_node == per_node
    assert cluster.inter.bandwidth == pytest.approx(gbit_a_device * 1e9 / 8)


@given(NAMES, st.integers(1, 64), st.integers(1, 16))
def test_every_cluster_of_the_catalogue_goes_to_json_and_back(name: str, nodes: int, per_node: int) -> None:
    cluster = Cluster.of(name, nodes, per_node)
    assert cluster.num_devices == nodes * per_node
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_links_and_prices_of_the_users_own_win() -> None:
    cluster = Cluster.of("h100", 4, intra="100 GB/s", inter="25GbE", price=1.5)
    assert cluster.intra.bandwidth == 100e9
    assert cluster.intra.latency_s == Link.of("nvlink-4").latency_s
    assert cluster.inter == Link.of("25GbE")
    assert cluster.price_per_device_hour == 1.5
    assert cluster.price_source == "given by the user"


def test_ports_are_shared_when_their_number_is_given() -> None:
    shared = Cluster.of("h100", 4, inter="100GbE", ports=2)
    assert shared.inter.bandwidth == pytest.approx(2 * 12.5e9 / 8)
    assert Cluster.of("dgx-h100", 4, ports=8).inter == Link.of("infiniband-ndr")
    assert Cluster.of("dgx-h100", 4, per_node=4).inter == Link.of("infiniband-ndr")


def test_a_price_says_when_and_where_it_was_asked() -> None:
    cluster = Cluster.of("h200")
    assert cluster.price_per_device_hour == pytest.approx(63.296 / 8)
    assert "AWS" in cluster.price_source
    assert "2026-08-06" in cluster.price_source
    assert Cluster.of("trainium2").price_per_device_hour is None


def test_a_device_of_the_users_own_needs_its_links() -> None:
    own = Device(name="mine", memory_bytes="48 GiB", peak_flops={"bf16": "400 TFLOP/s"},
                 memory_bandwidth="1 TB/s", power_w="300 W", source="me")  # fmt: skip
    assert own.memory_bytes == 48 * 2**30
    cluster = Cluster.of(own, 2, 4, intra="pcie-5", inter="100GbE")
    assert cluster.device is own
    with pytest.raises(SpecError, match="intra=None is not valid for a user-defined device"):
        Cluster.of(own, 2, 4, inter="100GbE")
    with pytest.raises(
        SpecError, match=r"intra='50 GB/s' is a bandwidth, .* give Link.of\('50 GB/s', latency_s='5 us'\)"
    ):
        Cluster.of(own, 2, 4, intra="50 GB/s", inter="100GbE")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Cluster.of("h100", nodes=0), "nodes=0 is not valid: it should be greater than or equal to 1"),
        (lambda: Cluster.of("h100", per_node=-8), "per_node=-8 is not valid: it should be greater than or equal to 1"),
        (lambda: Cluster.of("h100", inter="-5 GB/s"), "inter='-5 GB/s' is not valid: it should be greater than 0"),
        (lambda: Cluster.of("h100", inter="200 G"), "inter='200 G' has the unit 'G', .* Gbit/s or GB/s"),
        (lambda: Cluster.of("h100", inter="200"), "inter='200' has no unit"),
        (lambda: Cluster.of("h100", inter="token ring"), "inter='token ring' is not known; .*valid names are .*25GbE"),
        (lambda: Cluster.of("h100", ports=0), "ports=0 is not valid"),
        (lambda: Cluster.of("h100", per_node=0, ports=2), "devices=0 is not valid"),
        (lambda: Cluster.of("h100", price=-1), "price_per_device_hour=-1 is not valid"),
        (lambda: Cluster.of("k80"), "device or node='k80' is not known; .*valid names are .*a100-80gb"),
        (lambda: Link.of("25 GB/s"), "link='25 GB/s' is a bandwidth, which needs a latency"),
        (lambda: Link.of("25GbE").replace(bandwidth=float("inf")), "bandwidth=inf is not valid: it should be a finite"),
        (lambda: Cluster.of("a100-80gb").replace(nvme_bandwidth=float("inf")), "nvme_bandwidth=inf is not valid"),
        (lambda: Link.of("25GbE", latency_s="-1 us"), r"latency_s=.* is not valid: it should be greater than or equal"),
        (lambda: Link.of("25GbE").replace(bandwidth=-1), "bandwidth=-1 is not valid: it should be greater than 0"),
        (lambda: Link.of("25GbE").replace(bandwidth="25"), "bandwidth='25' has no unit"),
        (lambda: Device.of("h100").replace(memory_bytes="80"), "memory_bytes='80' has no unit; write '80 GiB'"),
        (lambda: Device.of("h100").replace(peak_flops={"bf16": 0}), r"peak_flops.bf16=0 is not valid"),
        (
            lambda: Device.of("h100").replace(architecture="Hopper"),
            "architecture='Hopper' is not the name of an architecture; use the compiler's name, such as sm_90",
        ),
        (lambda: Device.of("h100").replace(context_bytes="90 GB"), "context_bytes=90 GB leaves none of memory"),
        (Cluster.mixed, "Cluster.mixed needs at least one cluster"),
        (lambda: Cluster.mixed(Cluster.of("cpu"), Cluster.of("tpu-v4")), "have no dtype in common"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(make, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_mixed_cluster_is_described_by_its_weakest_parts() -> None:
    new, old = Cluster.of("h100", nodes=2, price=4.0), Cluster.of("v100-32gb", nodes=6, per_node=4, price=1.0)
    mixed = Cluster.mixed(new, old)
    assert mixed.groups == (new, old)
    assert mixed.num_devices == 16 + 24
    assert mixed.per_node == 4
    assert mixed.device.memory_bytes == old.device.memory_bytes
    assert mixed.device.peak_flops == old.device.peak_flops
    assert mixed.device.power_w == new.device.power_w
    assert not mixed.device.architecture
    assert Cluster.mixed(new, Cluster.of("h200")).device.architecture == "sm_90"
    assert mixed.intra == old.intra
    assert mixed.inter == old.inter
    assert mixed.price_per_device_hour == pytest.approx((16 * 4 + 24 * 1) / 40)
    assert Cluster.mixed(new, old, inter="1 GB/s").inter.bandwidth == 1e9
    assert Cluster.from_json(mixed.to_json()) == mixed


def test_a_mixed_cluster_has_no_price_unless_all_parts_have() -> None:
    assert Cluster.mixed(Cluster.of("h100"), Cluster.of("trainium2")).price_per_device_hour is None


@given(
    st.lists(st.sampled_from([n for n in Device.names() if not n.startswith("tpu")]), min_size=1, max_size=4)
)
def test_no_group_falls_short_of_the_cluster_it_is_in(names: list[str]) -> None:
    parts = [Cluster.of(name) for name in names]
    mixed = Cluster.mixed(*parts)
    assert mixed.num_devices == sum(part.num_devices for part in parts)
    for part in parts:
        assert part.device.memory_bytes >= mixed.device.memory_bytes
        assert part.device.memory_bandwidth >= mixed.device.memory_bandwidth
        assert part.inter.bandwidth >= mixed.inter.bandwidth
        assert part.intra.bandwidth >= mixed.intra.bandwidth
        assert part.per_node >= mixed.per_node
        assert all(part.device.peak_flops[key] >= rate for key, rate in mixed.device.peak_flops.items())


def test_mixing_mixed_clusters_takes_them_apart() -> None:
    a, b, c = (Cluster.of(name) for name in ("h100", "a100-80gb", "v100-32gb"))
    assert Cluster.mixed(Cluster.mixed(a, b), c).groups == (a, b, c)


def test_every_node_of_the_catalogue_names_a_device_and_links_of_it() -> None:
    for name in catalogue.table("nodes"):
        cluster = Cluster.of(name)
        assert cluster.intra.bandwidth >= cluster.inter.bandwidth
