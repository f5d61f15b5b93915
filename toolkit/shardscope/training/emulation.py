"""Emulation by a rank on an emulated node: a slow processor, and latency if the kernel cannot add any.

The agent of the node passes the settings to the ranks in an environment variable. The kernel limits the links' rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardscope.spec import Link
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.cluster.emulated import EmulatedNode
from shardscope.spec.link import PACED_UP_TO
from shardscope.spec.units import bytes_text, flops_text

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
    def processor(self) -> EmulatedNode | None:
        """This rank's node, whose processor is emulated; None if the rank computes at this machine's speed."""
        node = self.cluster.nodes[self.node]
        return node if node.slowdown > 1 or node.flops is not None else None

    @property
    def paced_link(self) -> Link | None:
        """The link whose latency the rank adds to its messages; None if the kernel adds it, or there is no latency.

        A single node has no latency, which occurs only between nodes.
        """
        return None if self.delays_in_kernel or not self.cluster.latency_s else self.cluster.link

    def described(self) -> dict[str, Any]:
        """Return the link's settings and notes on all that is emulated, for the ``start`` event."""
        cluster = self.cluster
        notes = [note for note in (self._latency_note(), self._compute_note()) if note]
        return {
            "bandwidth": cluster.slowest, "latency_s": cluster.latency_s, "label": cluster.name,
            "is_accurate": cluster.link is None or cluster.slowest <= PACED_UP_TO, "note": "; ".join(notes) or None,
            "paces_compute": self.processor is not None and self.processor.flops is not None,
        }  # fmt: skip

    def _latency_note(self) -> str:
        if self.paced_link is None:
            return ""
        return (
            "the kernel has no netem, so each rank adds the latency to its messages, including those to "
            "ranks of its own node, and by formula to the backend's collectives"
        )

    def _compute_note(self) -> str:
        told = [
            *_rates([node.flops for node in self.cluster.nodes], lambda rate: f"{flops_text(rate)} per rank"),
            *_rates(
                [node.memory_bandwidth for node in self.cluster.nodes],
                lambda rate: f"updates at {bytes_text(rate)}/s",
            ),
            *(f"{factor:g} times as long on node {node}" for node, factor in self._slow_nodes()),
        ]
        return f"computation is emulated, by sleeping: {', '.join(told)}" if told else ""

    def _slow_nodes(self) -> Iterator[tuple[int, float]]:
        return ((node, each.slowdown) for node, each in enumerate(self.cluster.nodes) if each.slowdown > 1)


def _rates(rates: Sequence[float | None], told: Callable[[float], str]) -> Iterator[str]:
    """Yield a description of each distinct rate, with the nodes that have it if not all do."""
    known = dict.fromkeys(rate for rate in rates if rate is not None)
    for rate in known:
        nodes = [str(node) for node, each in enumerate(rates) if each == rate]
        where = f" on node{'s' * (len(nodes) > 1)} {' and '.join(nodes)}" if len(nodes) < len(rates) else ""
        yield f"{told(rate)}{where}"
