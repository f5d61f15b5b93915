"""What a rank on an emulated node emulates itself: a slow processor, and latency if the kernel cannot add any.

The agent of the node passes it to the ranks in an environment variable. The rates of the links are the kernel's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardscope.spec import Link
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.link import PACED_UP_TO

VARIABLE = "SHARDSCOPE_EMULATED"


@dataclass(frozen=True)
class Emulation:
    """The emulated cluster that a rank runs on.

    Attributes:
        cluster: The cluster.
        node: The rank's node.
        delays_in_kernel: Whether the kernel adds the latency.
    """

    cluster: EmulatedCluster
    node: int
    delays_in_kernel: bool

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Emulation | None:
        """Return the emulation that environment variables describe; None on real machines."""
        text = env.get(VARIABLE)
        if text is None:
            return None
        fields = json.loads(text)
        cluster = EmulatedCluster.from_fields(fields["cluster"])
        return cls(cluster, fields["node"], fields["delays_in_kernel"])

    def to_env(self) -> dict[str, str]:
        """Return the environment variable that `from_env` reads."""
        fields = {
            "cluster": self.cluster.model_dump(mode="json"),
            "node": self.node,
            "delays_in_kernel": self.delays_in_kernel,
        }
        return {VARIABLE: json.dumps(fields)}

    @property
    def slowdown(self) -> float:
        """Factor by which the computation of this rank is slowed down."""
        return self.cluster.nodes[self.node].slowdown

    @property
    def paced_link(self) -> Link | None:
        """The link whose latency the rank adds to its messages; None if the kernel adds it, or there is none to add.

        There is none with a single node: latency is between nodes.
        """
        return None if self.delays_in_kernel or not self.cluster.latency_s else self.cluster.link

    def described(self) -> dict[str, Any]:
        """Return the link's settings and what else is emulated, for the ``start`` event."""
        cluster = self.cluster
        notes = [note for note in (self._latency_note(), self._slowdown_note()) if note]
        return {
            "bandwidth": cluster.slowest, "latency_s": cluster.latency_s, "label": cluster.name,
            "is_accurate": cluster.link is None or cluster.slowest <= PACED_UP_TO, "note": "; ".join(notes) or None,
        }  # fmt: skip

    def _latency_note(self) -> str:
        if self.paced_link is None:
            return ""
        return (
            "the kernel has no netem, so each rank adds the latency to its messages, also to ranks of its own node, "
            "and to the backend's collectives by their formula"
        )

    def _slowdown_note(self) -> str:
        slow = {node: each.slowdown for node, each in enumerate(self.cluster.nodes) if each.slowdown > 1}
        told = ", ".join(f"{factor:g} times as long on node {node}" for node, factor in slow.items())
        return f"computation is emulated, by sleeping: {told}" if told else ""


class ComputePace:
    """Slows down the computation of this thread by sleeping, in proportion to the processor time that it takes.

    Waiting for a core, which other ranks use, counts as part of the sleep. So where ranks outnumber cores, each rank
    computes at the same emulated speed as long as the slowdown is at least the number of ranks per core.

    Args:
        slowdown: Time that computation takes, relative to this processor.
    """

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self._last: dict[str, float] = {}

    def begin(self) -> tuple[float, float]:
        """Return the present time and processor time of this thread, for `end`."""
        return time.perf_counter(), time.thread_time()

    def end(self, began: tuple[float, float]) -> None:
        """Sleep until the computation since `began` has taken as long as on the emulated processor."""
        elapsed, computing = time.perf_counter() - began[0], time.thread_time() - began[1]
        time.sleep(max(0.0, self.slowdown * computing - elapsed))

    def before(self, name: str) -> float:
        """Sleep for what computation `name` will take longer, judged by the last time; return the processor time.

        For computation that other ranks wait for before it has ended, such as a backward pass that exchanges gradients.
        """
        time.sleep((self.slowdown - 1) * self._last.get(name, 0.0))
        return time.thread_time()

    def after(self, name: str, began: float) -> None:
        """Note the processor time that computation `name` has taken since `before` returned `began`."""
        self._last[name] = time.thread_time() - began
