"""An emulated cluster: nodes that are network namespaces of one Linux machine, with links of limited rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.link import Link
from shardscope.spec.units import Bandwidth, Seconds, bit_rate_text, quantity, seconds_text

MOST_NODES = 100
PAYLOAD = 1448 / 1538
"""Share of an Ethernet link's bits that TCP can fill with payload: 1448 of the 1538 bytes that a full frame takes on
the wire, with its headers (TCP with time stamps, IPv4, Ethernet), checksum, preamble and gap."""
FIRST_HOST = 100
"""Last part of the first node's address. All of them have three digits, so that they sort as text in node order."""

Rates = Mapping[int, str | float]


class EmulatedNode(Spec):
    """One node of an emulated cluster."""

    upload: Bandwidth
    """Bytes per second from the node to its switch."""
    download: Bandwidth
    """Bytes per second from the switch to the node."""
    slowdown: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Factor by which the computation of the node's ranks is slowed down, by sleeping. 1 to 1000."""


class EmulatedCluster(Spec):
    """Nodes emulated on this machine; `Cluster.emulated` builds one, and `launch` and `predict` take it."""

    nodes: Annotated[tuple[EmulatedNode, ...], Field(min_length=1, max_length=MOST_NODES)]
    """The nodes, in the order of their ranks. 1 to 100."""
    per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks per node. 1 to 64."""
    latency_s: Seconds = 0.0
    """Latency between two nodes, in seconds and one direction."""
    racks: Annotated[int, Field(ge=1)] = 1
    """Number of racks, each with its own switch and an equal number of consecutive nodes."""
    rack_bandwidth: Bandwidth | None = None
    """Bytes per second in each direction between the switch of a rank's rack and the core switch; required with several
    racks."""

    @model_validator(mode="after")
    def _check_racks(self) -> Self:
        if len(self.nodes) % self.racks:
            raise SpecError(
                f"racks={self.racks} does not divide nodes={len(self.nodes)}; use a divisor of {len(self.nodes)}"
            )
        if (self.racks > 1) != (self.rack_bandwidth is not None):
            told = "needs" if self.racks > 1 else "does not take"
            write = "give for example rack_bandwidth='1 Gbit/s'" if self.racks > 1 else "give racks=2 or more"
            raise SpecError(f"racks={self.racks} {told} a rack_bandwidth; {write}")
        return self

    @classmethod
    def of(
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
    ) -> Self:
        """Build the cluster; see `Cluster.emulated`."""
        if type(nodes) is not int or not 1 <= nodes <= MOST_NODES:
            raise SpecError(f"nodes={nodes!r} is not valid: give a whole number from 1 to {MOST_NODES}")
        for field, given in (("node_bandwidth", node_bandwidth), ("upload", upload), ("slowdown", slowdown)):
            wrong = next((key for key in given or {} if key not in range(nodes)), None)
            if wrong is not None:
                raise SpecError(f"{field} names node {wrong!r}, but the nodes are 0 to {nodes - 1}")
        both, up, slow = node_bandwidth or {}, upload or {}, slowdown or {}
        parts = [
            EmulatedNode(
                upload=up.get(node, both.get(node, bandwidth)),
                download=both.get(node, bandwidth),
                slowdown=slow.get(node, 1.0),
            )
            for node in range(nodes)
        ]
        return cls(
            nodes=tuple(parts),
            per_node=per_node,
            latency_s=quantity(latency, "s", field="latency"),
            racks=racks,
            rack_bandwidth=rack_bandwidth,
        )

    @property
    def num_devices(self) -> int:
        """Number of ranks on all nodes."""
        return len(self.nodes) * self.per_node

    @property
    def slowest(self) -> float:
        """Rate of the slowest link, in bytes per second, with headers."""
        rates = [min(node.upload, node.download) for node in self.nodes]
        return min([*rates, *([] if self.rack_bandwidth is None else [self.rack_bandwidth])])

    @property
    def link(self) -> Link | None:
        """The slowest link as one rank can use it: the bandwidth is that of payload, without headers.

        None with a single node: its ranks send nothing over its link.
        """
        if len(self.nodes) == 1:
            return None
        return Link(
            name=self.name, bandwidth=self.slowest * PAYLOAD, latency_s=self.latency_s, source="emulated"
        )

    @property
    def slowdown(self) -> float:
        """The largest slowdown of any node."""
        return max(node.slowdown for node in self.nodes)

    @property
    def name(self) -> str:
        """Description such as ``4 emulated nodes, 1 Gbit/s, 1 ms``; of uneven links, the slowest is named.

        ``1 emulated node of 4 ranks`` has no link, because its ranks do not use it.
        """
        several = f" of {self.per_node} ranks" if self.per_node > 1 else ""
        if len(self.nodes) == 1:
            return f"1 emulated node{several}"
        rates = {rate for node in self.nodes for rate in (node.upload, node.download)}
        even = len(rates) == 1 and self.rack_bandwidth is None
        rate = f"{'' if even else 'slowest link '}{bit_rate_text(self.slowest)}"
        return f"{len(self.nodes)} emulated nodes{several}, {rate}, {seconds_text(self.latency_s)}"

    def rack_of(self, node: int) -> int:
        """Return the rack of a node."""
        return node * self.racks // len(self.nodes)

    @staticmethod
    def address(node: int) -> str:
        """Return the address of a node, which is its host name as well."""
        return f"10.77.0.{FIRST_HOST + node}"
