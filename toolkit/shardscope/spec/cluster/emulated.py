"""An emulated cluster: nodes that are network namespaces of one Linux machine, with links of limited rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.link import Link
from shardscope.spec.units import Bandwidth, Flops, Seconds, bit_rate_text, flops_text, quantity, seconds_text

if TYPE_CHECKING:
    from shardscope.spec.job import Job

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
    flops: Flops | None = None
    """FLOP/s at which each rank computes its forward and backward passes, divided by `slowdown`, by sleeping; None for
    the speed of this machine."""
    memory_bandwidth: Bandwidth | None = None
    """Bytes per second at which each rank updates its parameters, divided by `slowdown`, by sleeping; None for this
    machine's speed."""


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
        flops: str | float | None = None,
        memory_bandwidth: str | float | None = None,
        racks: int = 1,
        rack_bandwidth: str | float | None = None,
    ) -> Self:
        """Describe a cluster emulated on this Linux machine, for `launch` and `predict`; needs no root.

        Each node is a network namespace with a link of its own, and its ranks send real TCP over it. The kernel limits
        the rates as on Ethernet: headers and gaps take 5.9 % of them. Switches have deep buffers and drop nothing.
        The latency is the kernel's too if it has netem; otherwise each rank delays its messages by it.

        With `flops`, computation is emulated as well: ranks really compute, and then sleep until the time has passed
        that a processor of this speed would take. So computation takes a known time even where ranks outnumber cores,
        as long as this machine is fast enough; `Summary.late_s_per_step` says by how much it was not.

        Args:
            nodes: Number of nodes, 1 to 100. The ranks of a single node send nothing over its link, so rates and
                latency have no effect.
            bandwidth: Rate of each node's link in each direction, in bytes per second or with a unit. The kernel keeps
                rates up to about 5 Gbit/s; on few cores, less.
            latency: Latency between two nodes in one direction, in seconds or with a unit.
            per_node: Ranks per node; ranks of one node are not limited by its link when they send to each other.
            node_bandwidth: Rates of single nodes, in both directions, by node from 0.
            upload: Rates of single nodes from the node to its switch.
            slowdown: Factors by which the computation of single nodes is slowed down, by sleeping: relative to `flops`
                and `memory_bandwidth`, or to the processor time that it takes on this machine.
            flops: Rate at which each rank computes, in FLOP/s or with a unit, such as ``"2 GFLOP/s"``: a forward pass
                takes the FLOPs of its matrix products divided by this rate, and a backward pass twice as long (three
                times with full recomputation). None for the speed of this machine.
            memory_bandwidth: Rate at which each rank's update reads and writes gradients, weights and optimizer states,
                in bytes per second or with a unit. None for the speed of this machine; needs `flops`.
            racks: Number of racks, each with its own switch; they are joined by a core switch.
            rack_bandwidth: Rate between a rack and the core switch in each direction; required with several racks.

        Raises:
            SpecError: A count, rate or node number is not valid, or the racks do not divide the nodes.

        Example:
            >>> EmulatedCluster.of(nodes=4, bandwidth="1 Gbit/s", latency="1 ms", flops="2 GFLOP/s").name
            '4 emulated nodes, 1 Gbit/s, 1 ms, 2 GFLOP/s'
        """
        if type(nodes) is not int or not 1 <= nodes <= MOST_NODES:
            raise SpecError(f"nodes={nodes!r} is not valid: give a whole number from 1 to {MOST_NODES}")
        for field, given in (("node_bandwidth", node_bandwidth), ("upload", upload), ("slowdown", slowdown)):
            wrong = next((key for key in given or {} if key not in range(nodes)), None)
            if wrong is not None:
                raise SpecError(f"{field} names node {wrong!r}, but the nodes are 0 to {nodes - 1}")
        if memory_bandwidth is not None and flops is None:
            raise SpecError(
                f"memory_bandwidth={memory_bandwidth!r} has no effect without flops; give for example flops='2 GFLOP/s'"
            )
        both, up, slow = node_bandwidth or {}, upload or {}, slowdown or {}
        parts = [
            EmulatedNode(
                upload=up.get(node, both.get(node, bandwidth)),
                download=both.get(node, bandwidth),
                slowdown=slow.get(node, 1.0),
                flops=flops,
                memory_bandwidth=memory_bandwidth,
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

    @staticmethod
    def check_link(job: Job) -> None:
        """Reject a job with a link of its own: it would be ignored, as ranks use those of the cluster.

        Raises:
            SpecError: The job has a link.
        """
        if job.link is not None:
            raise SpecError(
                f"link={job.link.label!r} cannot be combined with an emulated cluster, which has links of its own; "
                "use link=None"
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
    def has_equal_links(self) -> bool:
        """Whether all ranks have links of the same rate to other nodes, which they do not share with other ranks."""
        rates = {rate for node in self.nodes for rate in (node.upload, node.download)}
        return len(self.nodes) == 1 or (self.per_node == 1 and self.racks == 1 and len(rates) == 1)

    @property
    def slowdown(self) -> float:
        """The largest slowdown of any node."""
        return max(node.slowdown for node in self.nodes)

    @property
    def flops(self) -> float | None:
        """FLOP/s at which each rank of the slowest node computes; None if this machine's speed is not replaced."""
        rates = [node.flops / node.slowdown for node in self.nodes if node.flops is not None]
        return min(rates, default=None)

    @property
    def memory_bandwidth(self) -> float | None:
        """Bytes per second at which each rank of the slowest node updates its parameters; None for this machine's."""
        rates = [
            node.memory_bandwidth / node.slowdown for node in self.nodes if node.memory_bandwidth is not None
        ]
        return min(rates, default=None)

    @property
    def name(self) -> str:
        """Description such as ``4 emulated nodes, 1 Gbit/s, 1 ms``; of uneven nodes, the slowest values are named.

        ``1 emulated node of 4 ranks`` has no link, because its ranks do not use it.
        """
        several = f" of {self.per_node} ranks" if self.per_node > 1 else ""
        paces = {(node.flops, node.slowdown) for node in self.nodes}
        slowest = "slowest node " if len(paces) > 1 else ""
        speed = "" if self.flops is None else f", {slowest}{flops_text(self.flops)}"
        if len(self.nodes) == 1:
            return f"1 emulated node{several}{speed}"
        rates = {rate for node in self.nodes for rate in (node.upload, node.download)}
        rate = f"{'' if len(rates) == 1 else 'slowest link '}{bit_rate_text(min(rates))}"
        racks = ""
        if self.rack_bandwidth is not None:
            racks = f" in {self.racks} racks"
            rate += f", uplinks {bit_rate_text(self.rack_bandwidth)}"
        return (
            f"{len(self.nodes)} emulated nodes{several}{racks}, {rate}, {seconds_text(self.latency_s)}{speed}"
        )

    def rack_of(self, node: int) -> int:
        """Return the rack of a node."""
        return node * self.racks // len(self.nodes)

    @staticmethod
    def address(node: int) -> str:
        """Return the address of a node, which is its host name as well."""
        return f"10.77.0.{FIRST_HOST + node}"
