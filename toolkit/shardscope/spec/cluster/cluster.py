"""A cluster: identical nodes with links inside and between them, or groups of different nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import NonNegativeFloat

from shardscope.errors import SpecError
from shardscope.spec import catalogue
from shardscope.spec._base import Spec
from shardscope.spec.cluster.emulated import EmulatedCluster, Rates
from shardscope.spec.cluster.mixed import slowest_device, slowest_link
from shardscope.spec.cluster.parts import Device
from shardscope.spec.cluster.usual import device_and_node, inter_link, intra_link, link_of, usual_price
from shardscope.spec.link import Link
from shardscope.spec.numbers import Degree
from shardscope.spec.units import BandwidthOrNone, Bytes, BytesOrNone

_HOST_FIELDS = ("host_memory_bytes", "nvme_bytes", "nvme_bandwidth")


class Cluster(Spec):
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
            price_per_device_hour=dollars,
            price_source=price_source,
        )

    @classmethod
    def mixed(cls, *groups: Cluster, inter: str | Link | None = None) -> Cluster:
        """Build a cluster from groups of different nodes, for a pipeline whose stages run on different devices.

        The field `groups` contains the parts. The other fields are worst cases over all parts: the smallest memory, the
        lowest rates, the dtypes that all devices support, the fewest devices per node, the least host memory. But
        `num_devices` counts all devices, and the price is the mean over all devices.

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
            price_per_device_hour=price,
            price_source="" if price is None else "mean over all devices",
            groups=parts,
        )

    @classmethod
    def emulated(
        cls,
        nodes: int = 4,
        bandwidth: str | float = "1 Gbit/s",
        latency: str | float = 0.0,
        *,
        per_node: int = 1,
        node_bandwidth: Rates | None = None,
        upload: Rates | None = None,
        slowdown: Mapping[int, float] | None = None,
        racks: int = 1,
        rack_bandwidth: str | float | None = None,
    ) -> EmulatedCluster:
        """Describe a cluster emulated on this Linux machine, for `launch` and `predict`; needs no root.

        Each node is a network namespace with a link of its own, and its ranks send real TCP over it. The kernel limits
        the rates as on Ethernet: headers and gaps take 5.9 % of them. Switches have deep buffers and drop nothing.
        The latency is the kernel's too if it has netem; otherwise each rank delays its messages by it.

        Args:
            nodes: Number of nodes, 1 to 100. The ranks of a single node send nothing over its link, so rates and
                latency have no effect.
            bandwidth: Rate of each node's link in each direction, in bytes per second or with a unit. The kernel keeps
                rates up to about 5 Gbit/s; on few cores, less.
            latency: Latency between two nodes in one direction, in seconds or with a unit.
            per_node: Ranks per node; ranks of one node are not limited by its link when they send to each other.
            node_bandwidth: Rates of single nodes, in both directions, by node from 0.
            upload: Rates of single nodes from the node to its switch.
            slowdown: Factors by which the computation of single nodes is slowed down, by sleeping. Where ranks
                outnumber cores, a slowdown of all nodes makes their computation independent of the cores.
            racks: Number of racks, each with its own switch; they are joined by a core switch.
            rack_bandwidth: Rate between a rack and the core switch in each direction; required with several racks.

        Raises:
            SpecError: A count, rate or node number is not valid, or the racks do not divide the nodes.

        Example:
            >>> Cluster.emulated(nodes=4, bandwidth="1 Gbit/s", latency="1 ms").name
            '4 emulated nodes, 1 Gbit/s, 1 ms'
        """
        return EmulatedCluster.of(
            nodes, bandwidth, latency, per_node=per_node, node_bandwidth=node_bandwidth, upload=upload,
            slowdown=slowdown, racks=racks, rack_bandwidth=rack_bandwidth,
        )  # fmt: skip

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
