"""A cluster: identical nodes with links inside and between them, or groups of different nodes."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import NonNegativeFloat, PositiveFloat

from shardscope.errors import SpecError
from shardscope.spec import catalogue
from shardscope.spec._base import Spec
from shardscope.spec.cluster.emulated import EmulatedCluster
from shardscope.spec.cluster.mixed import slowest_device, slowest_link
from shardscope.spec.cluster.parts import Device
from shardscope.spec.cluster.usual import device_and_node, inter_link, intra_link, link_of, usual_price
from shardscope.spec.link import Link
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
    """Return the time between failures of the mean device, in hours: failure rates add up. None if one is unknown."""
    rate = 0.0
    for part in parts:
        if part.device_mtbf_hours is None:
            return None
        rate += part.num_devices / part.device_mtbf_hours
    return sum(part.num_devices for part in parts) / rate
