"""Where a job runs, as traits: this machine, or a cluster emulated on it. This module contains no widgets."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import traitlets as t

from shardscope.errors import SpecError, unknown_name
from shardscope.spec import Job
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.cluster.emulated import MOST_NODES
from shardscope.spec.units import Kind, bit_rate_text, flops_text, plural, positive, quantity, seconds_text
from shardscope_widgets.job_form.choices import LATENCIES, JobChoices
from shardscope_widgets.kit.form import named, own_trait, setting_in

HERE, EMULATED = "this machine", "an emulated cluster"
OWN_SPEED = "this machine's own"
PROCESSORS = ("0.2 GFLOP/s", "1 GFLOP/s", "5 GFLOP/s", "20 GFLOP/s")
_RATES = ("10 Mbit/s", "50 Mbit/s", "100 Mbit/s", "250 Mbit/s", "500 Mbit/s", "1 Gbit/s", "5 Gbit/s")


class PlaceChoices(t.HasTraits):
    """One trait per control. On an emulated cluster, the number of ranks is always nodes times ranks per node.

    Attributes:
        given: Clusters that no controls describe, by the name under which `place` offers them.
    """

    def __init__(self, **traits: Any) -> None:
        self.given: dict[str, EmulatedCluster] = {}
        super().__init__(**traits)

    place = own_trait(
        HERE,
        "Runs on",
        "Where the ranks run: this machine itself, or emulated nodes with real TCP traffic over rate-limited links.",
        values=named((HERE, EMULATED)),
    )
    nodes = own_trait(
        4, "Nodes", "Number of nodes, each with a link of its own.", least=1, most=MOST_NODES, reach=16
    )
    per_node = own_trait(
        1, "Ranks per node", "Ranks of one node send to each other without using its link.", least=1, most=64
    )
    node_bandwidth = own_trait(
        "1 Gbit/s", "Node link", "Rate of each node's link in each direction, such as 1 Gbit/s.", values=named(_RATES)
    )  # fmt: skip
    node_latency = own_trait(
        "0 s", "Node latency", "Latency between two nodes in one direction, such as 1 ms.",
        values=(("none", "0 s"), *named(LATENCIES[1:])),
    )  # fmt: skip
    processor = own_trait(
        OWN_SPEED,
        "Processor",
        "Speed at which each rank computes, emulated by sleeping; this machine must be faster.",
        values=named((OWN_SPEED, *PROCESSORS)),
    )
    racks = own_trait(
        1,
        "Racks",
        "Number of racks, each with its own switch and the same number of nodes.",
        least=1,
        most=50,
    )
    uplink = own_trait(
        "250 Mbit/s",
        "Rack uplink",
        "Rate of each rack's uplink, which its nodes share.",
        values=named(_RATES),
    )

    @t.validate("place")
    def _known_place(self, proposal: Mapping[str, Any]) -> str:
        known = (HERE, EMULATED, *self.given)
        if proposal["value"] not in known:
            raise unknown_name("place", proposal["value"], known)
        return str(proposal["value"])

    @property
    def is_emulated(self) -> bool:
        """Whether the ranks run on an emulated cluster that the other controls describe."""
        return bool(self.place == EMULATED)

    def cluster(self) -> EmulatedCluster | None:
        """Return the emulated cluster that the choices describe; None if the job runs on this machine.

        Raises:
            SpecError: A rate or time is not valid, the racks do not divide the nodes, or there are too many ranks.
        """
        if not self.is_emulated:
            return self.given.get(self.place)
        most, ranks = setting_in(JobChoices, "world_size").most, self.nodes * self.per_node
        if most is not None and ranks > most:
            raise SpecError(
                f"{plural(self.nodes, 'node')} with {plural(self.per_node, 'rank')} each are {ranks:,} ranks, but the "
                f"form starts at most {most:g}; choose fewer nodes or fewer ranks per node"
            )
        self._check_rate("node_bandwidth", "bytes/s")
        self._check("node_latency", "s")
        if self.racks > 1:
            self._check_rate("uplink", "bytes/s")
        if self.processor != OWN_SPEED:
            self._check_rate("processor", "FLOP/s")
        return Cluster.emulated(
            self.nodes, self.node_bandwidth, self.node_latency, per_node=self.per_node,
            flops=None if self.processor == OWN_SPEED else self.processor, racks=self.racks,
            rack_bandwidth=self.uplink if self.racks > 1 else None,
        )  # fmt: skip

    def _check_rate(self, name: str, kind: Kind) -> None:
        positive(
            self._check(name, kind), field=setting_in(PlaceChoices, name).label, given=getattr(self, name)
        )

    def _check(self, name: str, kind: Kind) -> float:
        """Parse a quantity; an error names its control, because the fields of the cluster have other names."""
        return quantity(getattr(self, name), kind, field=setting_in(PlaceChoices, name).label)

    def take(self, cluster: EmulatedCluster | None) -> None:
        """Set the choices to `cluster`, or to this machine if None; a cluster that they cannot describe is offered
        under its name.
        """
        if cluster is None:
            self.place = HERE
            return
        first = cluster.nodes[0]
        wanted: Mapping[str, Any] = {
            "nodes": len(cluster.nodes), "per_node": cluster.per_node, "racks": cluster.racks,
            "node_bandwidth": bit_rate_text(first.upload), "node_latency": seconds_text(cluster.latency_s),
            "processor": OWN_SPEED if first.flops is None else flops_text(first.flops),
            "uplink": self.uplink if cluster.rack_bandwidth is None else bit_rate_text(cluster.rack_bandwidth),
        }  # fmt: skip
        with suppress(SpecError):
            if PlaceChoices(place=EMULATED, **wanted).cluster() == cluster:
                with self.hold_trait_notifications():
                    for name, value in wanted.items():
                        setattr(self, name, value)
                    self.place = EMULATED
                return
        self.given[cluster.name] = cluster
        self.place = cluster.name

    def fit(self, world_size: int) -> None:
        """Adapt the nodes to `world_size`; use one rank per node if it is not a multiple of the ranks per node."""
        if self.is_emulated and world_size != self.nodes * self.per_node:
            if world_size % self.per_node:
                self.per_node = 1
            self.nodes = world_size // self.per_node


def check_on(job: Job, cluster: EmulatedCluster | None) -> None:
    """Reject a job that cannot run on a cluster.

    Raises:
        SpecError: The message says what to change.
    """
    if cluster is not None:
        from shardscope.runtime.emulated.launching import check_suits

        check_suits(job, cluster)


def recorded_on(job: Job, cluster: EmulatedCluster | None) -> Job:
    """Return the job as a run on a cluster records it; a cluster of None is this machine."""
    from shardscope.runtime.emulated.launching import as_launched

    return job if cluster is None else as_launched(job)
