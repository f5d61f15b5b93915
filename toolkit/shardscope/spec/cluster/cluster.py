"""A cluster: identical nodes with links inside and between them, or groups of different nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import NonNegativeFloat, PositiveFloat

from shardscope.errors import SpecError, quoted
from shardscope.spec import catalogue
from shardscope.spec._base import Spec
from shardscope.spec.cluster.emulated import EmulatedCluster
from shardscope.spec.cluster.parts import Device
from shardscope.spec.link import Link, is_rate
from shardscope.spec.numbers import Degree
from shardscope.spec.units import Bandwidth, BandwidthOrNone, Bytes, BytesOrNone, Seconds

_HOST_FIELDS = ("host_memory_bytes", "nvme_bytes", "nvme_bandwidth")


class _Emulated:
    """Base class with `EmulatedCluster.of` as a method, under the name by which users find it."""

    emulated = staticmethod(EmulatedCluster.of)


class Cluster(_Emulated, Spec):
    """Nodes of identical devices. `Cluster.of` uses the catalogue; `Cluster.mixed` joins several clusters."""

    name: str
    device: Device
    nodes: Degree = 1
    per_node: Degree = 8
    intra: Link
    """Link between the devices of one node."""
    inter: Link
    """Link between nodes. Its bandwidth is one device's share of what the node's network cards provide."""
    host_memory_bytes: Bytes = 1e12
    """Host memory of one node, in bytes."""
    nvme_bytes: BytesOrNone = 0.0
    """NVMe capacity of one node, in bytes."""
    nvme_bandwidth: BandwidthOrNone = 0.0
    """Bandwidth of one node's NVMe drives, in bytes per second."""
    device_mtbf_hours: PositiveFloat | None = None
    """Mean time between failures of one device with its share of the node and the network, in hours; None predicts
    training without failures. It was about 50,000 hours for the H100s that trained Llama 3 (arXiv 2407.21783)."""
    storage_bandwidth: Bandwidth = 6.5e8
    """Bytes per second at which one node writes and reads checkpoints while all nodes do so. The default is the
    sustained 2 TB/s of Llama 3's storage, divided by its nodes (arXiv 2407.21783, section 3.3.1)."""
    restart_s: Seconds = 300.0
    """Time from a failure to the first step after it, without reading the checkpoint: to detect the failure, replace
    the node and start the ranks."""
    price_per_device_hour: NonNegativeFloat | None = None
    """Price in US dollars per device and hour; None if unknown."""
    price_source: str = ""
    groups: tuple[Cluster, ...] = ()
    """The parts of a mixed cluster, in pipeline order; empty if all nodes are identical."""

    @property
    def num_devices(self) -> int:
        """Number of devices in all nodes."""
        if self.groups:
            return sum(group.num_devices for group in self.groups)
        return self.nodes * self.per_node

    @property
    def num_nodes(self) -> int:
        """Number of nodes in all groups."""
        return sum(group.num_nodes for group in self.groups) if self.groups else self.nodes

    @classmethod
    def of(
        cls,
        name: str | Device,
        nodes: int = 1,
        per_node: int | None = None,
        *,
        intra: str | Link | None = None,
        inter: str | Link | None = None,
        ports: int | None = None,
        price: float | None = None,
        device_mtbf_hours: float | None = None,
    ) -> Cluster:
        """Build a cluster from a device (``"a100-80gb"``) or node type (``"p4d.24xlarge"``) in the catalogue.

        Args:
            name: A device, whose usual node then supplies the links, or a node type.
            nodes: Number of nodes.
            per_node: Devices per node; None for the number in the usual node.
            intra: Link inside a node; None for the usual one. A name in the catalogue, a bandwidth (``"300 GB/s"``,
                combined with the usual link's latency) or a `Link`.
            inter: Link between nodes, specified like `intra`; one port per device unless `ports` is given.
            ports: Number of network ports, each with the bandwidth of `inter`, that the devices of a node share.
            price: US dollars per device and hour; None for the catalogue's price, which may be unknown.
            device_mtbf_hours: Mean time between failures of one device, in hours; None predicts without failures.

        Raises:
            SpecError: A name is unknown, a count is below 1, or a bandwidth has no unit.

        Example:
            >>> cluster = Cluster.of("a100-80gb", nodes=128)
            >>> cluster.num_devices, cluster.intra.name, cluster.inter.bandwidth
            (1024, 'nvlink-3', 25000000000.0)
        """
        device, node = device_and_node(name)
        count = node.get("per_node", 8) if per_node is None else per_node
        host = {field: node[field] for field in _HOST_FIELDS if field in node}
        dollars, price_source = usual_price(device.name) if price is None else (price, "given by the user")
        return cls(
            name=f"{nodes} x {count} {device.name}",
            device=device,
            nodes=nodes,
            per_node=count,
            intra=intra_link(intra, node),
            inter=inter_link(inter, ports, count, node),
            **host,
            device_mtbf_hours=device_mtbf_hours,
            price_per_device_hour=dollars,
            price_source=price_source,
        )

    @classmethod
    def mixed(cls, *groups: Cluster, inter: str | Link | None = None) -> Cluster:
        """Build a cluster from groups of different nodes, for a pipeline whose stages run on different devices.

        The field `groups` contains the parts. The other fields are worst cases over all parts: the smallest memory, the
        lowest rates, the dtypes that all devices support, the fewest devices per node, the least host memory. But
        `num_devices` counts all devices, and the price and the failure rate are the means over all devices.

        Args:
            groups: Clusters in pipeline order; a mixed cluster is replaced by its groups.
            inter: Link between groups, with the bandwidth of one device; None for the slowest of the groups' own links
                between nodes.
        """
        parts = tuple(part for group in groups for part in group.groups or (group,))
        if not parts:
            raise SpecError("groups=() is not valid: Cluster.mixed needs at least one cluster")
        between = slowest_link([part.inter for part in parts])
        price = _mean_price(parts)
        return cls(
            name=" + ".join(part.name for part in parts),
            device=slowest_device([part.device for part in parts]),
            nodes=sum(part.nodes for part in parts),
            per_node=min(part.per_node for part in parts),
            intra=slowest_link([part.intra for part in parts]),
            inter=link_of(inter, "inter", between),
            host_memory_bytes=min(part.host_memory_bytes for part in parts),
            nvme_bytes=min(part.nvme_bytes for part in parts),
            nvme_bandwidth=min(part.nvme_bandwidth for part in parts),
            device_mtbf_hours=_mean_mtbf(parts),
            storage_bandwidth=min(part.storage_bandwidth for part in parts),
            restart_s=max(part.restart_s for part in parts),
            price_per_device_hour=price,
            price_source="" if price is None else "mean over all devices",
            groups=parts,
        )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names that `of` accepts: devices, then node types."""
        return (*Device.names(), *catalogue.table("nodes"))


def _mean_price(parts: Sequence[Cluster]) -> float | None:
    """Return the mean price per device and hour, in US dollars; None if any device's price is unknown."""
    total = 0.0
    for part in parts:
        if part.price_per_device_hour is None:
            return None
        total += part.price_per_device_hour * part.num_devices
    return total / sum(part.num_devices for part in parts)


def _mean_mtbf(parts: Sequence[Cluster]) -> float | None:
    """Return the inverse of the mean failure rate of a device, in hours; None if the rate of any device is unknown."""
    rate = 0.0
    for part in parts:
        if part.device_mtbf_hours is None:
            return None
        rate += part.num_devices / part.device_mtbf_hours
    return sum(part.num_devices for part in parts) / rate


def slowest_device(devices: Sequence[Device]) -> Device:
    """Return a device with the worst value of every specification: lowest memory and rates, highest power limit.

    The device has the dtypes that all devices support. Its power limit is None if the power limit of any
    device is unknown.

    Raises:
        SpecError: The devices have no dtype in common.
    """
    if len({device.name for device in devices}) == 1:
        return devices[0]
    common = [name for name in devices[0].peak_flops if all(name in other.peak_flops for other in devices)]
    names = " + ".join(dict.fromkeys(device.name for device in devices))
    if not common:
        raise SpecError(f"groups of {names} have no dtype in common; use devices that share one")
    powers = [device.power_w for device in devices]
    return Device(
        name=names,
        memory_bytes=min(device.memory_bytes for device in devices),
        context_bytes=max(device.context_bytes for device in devices),
        peak_flops={name: min(device.peak_flops[name] for device in devices) for name in common},
        architecture=devices[0].architecture if len({device.architecture for device in devices}) == 1 else "",
        memory_bandwidth=min(device.memory_bandwidth for device in devices),
        power_w=None if None in powers else max(power for power in powers if power is not None),
        host_bandwidth=min(device.host_bandwidth for device in devices),
        source="the worst value of each specification of " + names,
        recalled=tuple(sorted({field for device in devices for field in device.recalled})),
    )


def slowest_link(links: Sequence[Link]) -> Link:
    """Return the link with the lowest bandwidth; in a tie, the one with the highest latency."""
    return min(links, key=lambda link: (link.bandwidth, -link.latency_s))


def device_and_node(name: str | Device) -> tuple[Device, Mapping[str, Any]]:
    """Return a device from the catalogue with its usual node, or the device of a node type with that node.

    A user-defined device has no usual node, and therefore no defaults.

    Raises:
        SpecError: Neither a device nor a node has this name.
    """
    if isinstance(name, Device):
        return name, _node_of(name.name) if catalogue.has("devices", name.name) else {}
    if isinstance(name, str) and catalogue.has("nodes", name):
        node = catalogue.lookup("nodes", name, field="node")[1]
        return Device.of(node["device"]), node
    if not isinstance(name, str) or not catalogue.has("devices", name):
        names = (*catalogue.table("devices"), *catalogue.table("nodes"))
        raise catalogue.unknown("device or node", name, names)
    return Device.of(name), _node_of(name)


def _node_of(device: str) -> Mapping[str, Any]:
    usual = catalogue.lookup("devices", device, field="device")[1]["node"]
    return catalogue.lookup("nodes", usual, field="node")[1]


def intra_link(link: str | Link | None, node: Mapping[str, Any]) -> Link:
    """Return the link inside a node: the given link, or else the node's own."""
    return link_of(link, "intra", Link.of(node["intra"]) if node else None)


def inter_link(link: str | Link | None, ports: int | None, per_node: int, node: Mapping[str, Any]) -> Link:
    """Return the link between nodes: the given link, or else the node's own, with one device's share of its bandwidth.

    The node's own ports are divided among all its devices, even if the cluster uses only some of them.
    """
    found = link_of(link, "inter", Link.of(node["inter"]) if node else None)
    if ports is not None:
        return found.shared(ports, per_node)
    return found.shared(node["ports"], node["per_node"]) if link is None else found


def link_of(link: str | Link | None, field: str, usual: Link | None) -> Link:
    """Return the link that a name or a bandwidth describes, or the usual link for None.

    A bandwidth is combined with the latency of the usual link.
    """
    if isinstance(link, Link):
        return link
    if link is None:
        if usual is None:
            raise SpecError(
                f"{field}=None is not valid for a user-defined device; give {field}='nvlink-4' or a Link"
            )
        return usual
    if usual is None and is_rate(link):
        raise SpecError(
            f"{field}={quoted(link)} is a bandwidth, which needs a latency; "
            f"give Link.of({quoted(link)}, latency_s='5 us')"
        )
    return Link.of(link, latency_s=usual.latency_s if usual and is_rate(link) else None, field=field)


def usual_price(device: str) -> tuple[float | None, str]:
    """Return the price per device and hour in US dollars (None if unknown), and the price's source with its date."""
    if not catalogue.has("prices", device):
        return None, ""
    entry = catalogue.lookup("prices", device, field="device")[1]
    return entry["usd_per_device_hour"], f"{entry['source']} ({entry['date']})"
