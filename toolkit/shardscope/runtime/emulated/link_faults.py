"""Drop and restore links of an emulated cluster according to the plan of faults.

The rank that notices that a link fault is due writes the fault's event and a request, which the coordinator carries
out. A node's own link is taken down. Packets between two nodes are dropped by blackhole routes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from shardscope.runtime.emulated.network import INTERFACE, EmulatedNetwork
from shardscope.runtime.record.inject import PlanWatch
from shardscope.runtime.record.rundir import RunDir
from shardscope.spec.fault_kinds import DropLink


@dataclass
class LinkFaults:
    """The faults of a run's links.

    Attributes:
        run: The run directory.
        waiting: Faults that have not been carried out yet, by the file that requests them.
    """

    run: RunDir
    waiting: dict[Path, DropLink] = field(default_factory=dict)
    _num_known: int = 0
    _dropped: list[tuple[float, DropLink]] = field(default_factory=list)
    """Dropped links that will be restored, each with the time of its restoration on the monotonic clock."""

    def __post_init__(self) -> None:
        self._watch = PlanWatch(self.run)

    @classmethod
    def of_run(cls, run: RunDir) -> Self:
        """Return the link faults of a run that no rank has requested yet."""
        links = cls(run)
        links._look()
        links.waiting = {path: fault for path, fault in links.waiting.items() if not path.exists()}
        return links

    def _look(self) -> None:
        """Add new faults from the plan."""
        plan = self._watch()
        if plan is None:
            return
        for number, fault in enumerate(plan):
            if number >= self._num_known and isinstance(fault, DropLink):
                self.waiting[self.run.fault_claims / f"{number}.link"] = fault
        self._num_known = len(plan)

    def carry_out(self, network: EmulatedNetwork) -> None:
        """Drop the links whose faults were requested, and restore the links whose faults are over. Call this often."""
        self._look()
        for path in [path for path in self.waiting if path.exists()]:
            fault = self.waiting.pop(path)
            _switch(network, fault, is_on=False)
            path.with_suffix(".done").touch(mode=0o600)
            if fault.lasts_s is not None:
                self._dropped.append((time.monotonic() + fault.lasts_s, fault))
        for due in [due for due in self._dropped if time.monotonic() >= due[0]]:
            self._dropped.remove(due)
            _switch(network, due[1], is_on=True)


def _switch(network: EmulatedNetwork, fault: DropLink, *, is_on: bool) -> None:
    nodes = fault.nodes
    if len(nodes) == 1:
        network.popen(nodes[0], ["ip", "link", "set", INTERFACE, "up" if is_on else "down"]).wait()
        return
    for node, other in (nodes, nodes[::-1]):
        route = ["ip", "route", "del" if is_on else "add", "blackhole", network.cluster.address(other)]
        network.popen(node, route).wait()
