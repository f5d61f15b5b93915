"""An emulated cluster: nodes that are network namespaces of one Linux machine, with links of limited rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.link import Link
from shardscope.spec.shares import BY_MEMORY
from shardscope.spec.units import (
    Bandwidth,
    Bytes,
    Flops,
    Seconds,
    bit_rate_text,
    flops_text,
    positive,
    quantity,
    seconds_text,
)

if TYPE_CHECKING:
    from shardscope.spec.job import Job

MOST_NODES = 100
PAYLOAD = 1448 / 1538
"""Share of an Ethernet link's bits that TCP can fill with payload: 1448 of the 1538 bytes that a full frame takes on
the wire, with its headers (TCP with time stamps, IPv4, Ethernet), checksum, preamble and gap."""
FIRST_HOST = 100
"""Last byte of the first node's address. In all nodes it has three digits, so addresses sort as text in node order."""

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
    """FLOP/s at which each rank computes its forward and backward passes, before division by `slowdown`; emulated by
    sleeping. None to use the speed of this machine."""
    memory_bandwidth: Bandwidth | None = None
    """Bytes per second at which each rank updates its parameters, before division by `slowdown`; emulated by sleeping.
    None to use the speed of this machine."""
    memory: Bytes | None = None
    """Memory of each rank in bytes, which `JobPrediction.fits` and ``shards="memory"`` of `Zero1` and `Zero2` use; it
    is not enforced. None if it is not specified."""

    @property
    def rate(self) -> float | None:
        """FLOP/s at which each rank computes, including `slowdown`; None to use the speed of this machine."""
        return None if self.flops is None else self.flops / self.slowdown

    @property
    def update_rate(self) -> float | None:
        """Bytes per second of each rank's update, including `slowdown`; None to use this machine's rate."""
        return None if self.memory_bandwidth is None else self.memory_bandwidth / self.slowdown


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
        memory: str | float | None = None,
        node_flops: Rates | None = None,
        node_memory_bandwidth: Rates | None = None,
        node_memory: Rates | None = None,
        racks: int = 1,
        rack_bandwidth: str | float | None = None,
    ) -> Self:
        """Describe a cluster emulated on this Linux machine, for `launch` and `predict`; needs no root.

        Each node is a network namespace with a link of its own, and its ranks send real TCP over it. The kernel limits
        the rates as on Ethernet: headers and gaps take 5.9 % of them. Switches have deep buffers and drop nothing.
        The kernel also emulates the latency if it has netem; otherwise, each rank delays its messages.

        With `flops`, computation is emulated as well: ranks really compute, and then sleep until the time has passed
        that a processor of this speed would take. Computation then takes a known time even if ranks outnumber cores, as
        long as this machine is fast enough; `Summary.late_s_per_step` is the time by which it was too slow.

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
            memory: Memory of each rank, in bytes or with a unit, for ``shards="memory"`` of `Zero1` and `Zero2`
                and for `fits` of a prediction. It is not enforced. None if it is not specified.
            node_flops: Rates of computation of single nodes, for different devices; without `flops`, give all
                nodes.
            node_memory_bandwidth: Rates of updates of single nodes; without `memory_bandwidth`, give all nodes.
            node_memory: Memory of the ranks of single nodes; without `memory`, give all nodes.
            racks: Number of racks, each with its own switch; they are joined by a core switch.
            rack_bandwidth: Rate between a rack and the core switch in each direction; required with several racks.

        Raises:
            SpecError: A count, rate or node number is not valid, or the racks do not divide the nodes.

        Example:
            >>> EmulatedCluster.of(nodes=4, bandwidth="1 Gbit/s", latency="1 ms", flops="2 GFLOP/s").name
            '4 emulated nodes, 1 Gbit/s, 1 ms latency, 2 GFLOP/s'
        """
        if type(nodes) is not int or not 1 <= nodes <= MOST_NODES:
            raise SpecError(f"nodes={nodes!r} is not valid: give a whole number from 1 to {MOST_NODES}")
        of_nodes: dict[str, tuple[Mapping[int, Any] | None, Any]] = {
            "node_bandwidth": (node_bandwidth, bandwidth), "upload": (upload, bandwidth), "slowdown": (slowdown, 1.0),
            "node_flops": (node_flops, flops), "node_memory_bandwidth": (node_memory_bandwidth, memory_bandwidth),
            "node_memory": (node_memory, memory),
        }  # fmt: skip
        for field, (given, usual) in of_nodes.items():
            _check_nodes(field, given or {}, usual, nodes)
        if flops is None and not node_flops and (memory_bandwidth is not None or node_memory_bandwidth):
            given_rate = memory_bandwidth if node_memory_bandwidth is None else node_memory_bandwidth
            name = "memory_bandwidth" if node_memory_bandwidth is None else "node_memory_bandwidth"
            raise SpecError(
                f"{name}={given_rate!r} has no effect without flops; give for example flops='2 GFLOP/s'"
            )

        def at(field: str, node: int) -> Any:
            given, usual = of_nodes[field]
            return (given or {}).get(node, usual)

        def link_rate(field: str, node: int) -> float:
            named = field if node in (of_nodes[field][0] or {}) else "bandwidth"
            given = at(field, node)
            return positive(quantity(given, "bytes/s", field=named), field=named, given=given)

        parts = [
            EmulatedNode(
                upload=link_rate("upload" if node in (upload or {}) else "node_bandwidth", node),
                download=link_rate("node_bandwidth", node),
                slowdown=at("slowdown", node), flops=at("node_flops", node),
                memory_bandwidth=at("node_memory_bandwidth", node), memory=at("node_memory", node),
            )
            for node in range(nodes)
        ]  # fmt: skip
        return cls(
            nodes=tuple(parts),
            per_node=per_node,
            latency_s=quantity(latency, "s", field="latency"),
            racks=racks,
            rack_bandwidth=rack_bandwidth,
        )

    def check_job(self, job: Job) -> None:
        """Reject a job with its own link, which would be ignored, or one that shards by a memory that is not specified.

        Raises:
            SpecError: The job has a link, or shards by memory on a cluster without `memory`.
        """
        if job.link is not None:
            raise SpecError(
                f"link={job.link.label!r} cannot be combined with an emulated cluster, which has links of its own; "
                "use link=None"
            )
        if getattr(job.strategy, "shards", None) == BY_MEMORY:
            self.stated_memory()

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
        """The slowest link as one rank can use it: its bandwidth counts only payload, without headers.

        None with a single node, whose ranks send nothing over a link.
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
        """FLOP/s at which each rank of the slowest node computes; None to use this machine's speed."""
        return min((node.rate for node in self.nodes if node.rate is not None), default=None)

    @property
    def memory_bandwidth(self) -> float | None:
        """Bytes per second of the update on each rank of the slowest node; None to use this machine's rate."""
        return min((node.update_rate for node in self.nodes if node.update_rate is not None), default=None)

    def stated_memory(self) -> tuple[float, ...]:
        """Return the memory of each rank, in bytes.

        Raises:
            SpecError: The cluster does not specify the memory.
        """
        found = [node.memory for node in self.nodes if node.memory is not None]
        if len(found) < len(self.nodes):
            raise SpecError(
                f"cluster {self.name!r} does not state the memory of its ranks; give "
                "ss.Cluster.emulated(..., memory='2 GB', node_memory={0: '4 GB'})"
            )
        return tuple(each for each in found for _ in range(self.per_node))

    @property
    def name(self) -> str:
        """Description such as ``4 emulated nodes, 1 Gbit/s, 1 ms latency``, with the slowest values of uneven nodes.

        ``1 emulated node of 4 ranks`` has no link, because its ranks do not use it.
        """
        several = f" of {self.per_node} ranks" if self.per_node > 1 else ""
        paces = {node.rate if node.flops else node.slowdown for node in self.nodes}
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
        latency = f", {seconds_text(self.latency_s)} latency" if self.latency_s else ""
        return f"{len(self.nodes)} emulated nodes{several}{racks}, {rate}{latency}{speed}"

    def rack_of(self, node: int) -> int:
        """Return the rack of a node."""
        return node * self.racks // len(self.nodes)

    @staticmethod
    def address(node: int) -> str:
        """Return the address of a node, which is its host name as well."""
        return f"10.77.0.{FIRST_HOST + node}"


def _check_nodes(field: str, given: Mapping[int, Any], usual: Any, nodes: int) -> None:
    """Reject values of nodes that do not exist, and, without a usual value, values of only some nodes."""
    wrong = next((key for key in given if key not in range(nodes)), None)
    if wrong is not None:
        raise SpecError(f"{field} names node {wrong!r}, but the nodes are 0 to {nodes - 1}")
    if usual is None and 0 < len(given) < nodes:
        missing = next(node for node in range(nodes) if node not in given)
        raise SpecError(
            f"{field} does not name node {missing}; name every node, or give {field.removeprefix('node_')} for the "
            "others"
        )
