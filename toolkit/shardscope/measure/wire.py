"""Time of each communication of a run on a link, computed from its communication pattern and its recorded bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardscope.analytic.communication import collective_time
from shardscope.methods.strategies.tree import Tree
from shardscope.runlog.schema import Event
from shardscope.spec import Job, Link

_RING = {
    "ring_all_reduce": "all_reduce",
    "ring_reduce_scatter": "reduce_scatter",
    "ring_all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "consensus": "all_reduce",
    "mean_model": "all_reduce",
    "noise_scale": "all_reduce",
}
_TREE = {"broadcast": "broadcast", "reduce": "reduce"}
_DIRECT = ("packet_all_to_all", "packet_all_gather", "agreement")


@dataclass(frozen=True)
class Counted:
    """Traffic of all collectives and transfers that share a name, in one step; the maximum over ranks."""

    num_bytes: int = 0
    """Bytes in one direction: the larger of the numbers sent and received."""
    messages: int = 0
    calls: int = 1


def busiest(events: Iterable[Event]) -> dict[str, Counted]:
    """Return the traffic of one step by communication name, as the maximum over ranks; `events` has one per rank."""
    found: dict[str, Counted] = {}
    for event in events:
        for name, row in event["traffic"].items():
            before = found.get(name, Counted())
            found[name] = Counted(
                max(before.num_bytes, row["sent_bytes"], row["received_bytes"]),
                max(before.messages, row.get("messages", 0)),
                max(before.calls, row.get("calls", 0)),
            )
    return found


class Links(NamedTuple):
    """Several links at once, as arrays of the same shape."""

    bandwidth: NDArray[np.float64]
    """Bytes per second, one value per link."""
    latency_s: NDArray[np.float64]


class Wire:
    """Formulas for the time that each communication of a job takes on any link.

    Args:
        job: The job of the run.
        backend: Communication backend of the run, from the run's start event.
    """

    def __init__(self, job: Job, backend: str) -> None:
        self.job, self.world_size = job, job.world_size
        self._on_gloo = backend.startswith("gloo")

    def seconds(
        self, name: str, payload: int, link: Link | Links | None, counted: Mapping[str, Counted]
    ) -> Any:
        """Return the time of one communication on a link, in seconds.

        The time is 0 on the machine's own link (None), for which measured times are used instead.

        Args:
            name: Name of the communication's span.
            payload: Number of bytes in this span.
            link: The link; for several links at once the result is an array.
            counted: The result of `busiest` for the step.
        """
        if link is None or self.world_size == 1:
            return 0.0
        if name == "server_exchange":
            return _served(counted, link)
        takes = self._formula(name, link)
        return _by_counts(counted.get(name, Counted()), link) if takes is None else takes(payload)

    def _formula(self, name: str, link: Link | Links) -> Callable[[int], Any] | None:  # noqa: PLR0911 - one per pattern
        if name == "reduce_scatter":
            name = "all_reduce" if self._on_gloo else "ring_reduce_scatter"  # gloo all-reduces
        if name in _RING:
            return self._by(_RING[name], "ring", link, self.job.strategy.ring_size(name, self.world_size))
        if name in _TREE:
            return self._by(_TREE[name], "tree", link, self.world_size)
        others = self.world_size - 1
        if name in _DIRECT:
            return lambda payload: link.latency_s + others / self.world_size * payload / link.bandwidth
        if name == "gossip_mix":
            return lambda payload: link.latency_s + min(2, others) * payload / link.bandwidth
        if name == "tree_all_reduce":
            longest = int(getattr(self.job.strategy, "slice_mb", Tree().slice_mb) * 2**20)
            return lambda payload: self._by(
                "all_reduce", "pipelined-tree", link, self.world_size, segments=max(1, -(-payload // longest))
            )(payload)
        if name == "barrier":
            return lambda _: others.bit_length() * link.latency_s
        return None

    def _by(
        self, op: str, algorithm: str, link: Link | Links, workers: int, **options: Any
    ) -> Callable[[int], Any]:
        def takes(payload: int) -> Any:
            found = collective_time(
                op=op, algorithm=algorithm, num_bytes=payload, workers=workers,
                bandwidth=link.bandwidth, latency=link.latency_s, **options,
            )  # fmt: skip
            return found if isinstance(link, Links) else float(found)

        return takes


def _served(counted: Mapping[str, Counted], link: Link | Links) -> Any:
    """Return the time of a push to the servers and a pull, including headers, on the busiest rank, in seconds."""
    parts = [
        counted.get(name, Counted()).num_bytes for name in ("server_push", "server_pull", "server_control")
    ]
    return 2 * link.latency_s + sum(parts) / link.bandwidth


def _by_counts(counted: Counted, link: Link | Links) -> Any:
    """Return the time of one call in seconds, if all calls with this name have equal traffic and do not overlap."""
    return (counted.num_bytes / link.bandwidth + counted.messages * link.latency_s) / max(1, counted.calls)
