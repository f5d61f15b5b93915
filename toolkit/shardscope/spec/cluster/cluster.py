"""A cluster: nodes of equal devices, a link inside a node and one between nodes."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from shardscope.spec._base import Spec
from shardscope.spec.cluster.parts import Device, Link


class Cluster(Spec):
    """Nodes of equal devices. `Cluster.of` makes one from the catalogue."""

    name: str
    device: Device
    nodes: PositiveInt = 1
    per_node: PositiveInt = 8
    intra: Link
    """Between devices of one node."""
    inter: Link
    """Between nodes, as one device's share of its node's network cards."""
    host_memory_bytes: PositiveFloat = 1e12
    """Of one node."""
    nvme_bytes: NonNegativeFloat = 0.0
    """Of one node."""
    nvme_bandwidth: NonNegativeFloat = 0.0
    """Bytes a second of one node's drives."""
    price_per_device_hour: NonNegativeFloat | None = None
    """US dollars."""
    price_source: str = ""

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.per_node
