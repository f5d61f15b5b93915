"""Links that messages share: links of ranks and nodes, and the uplinks of racks, each with its own rate.

A message occupies every link on its way at the same time. Messages on a link get equal shares of its rate, as TCP gives
them to connections: of two messages of 1 MB on an emulated link, both end within 1 % of the time that follows from it.
Messages that start together therefore take at least as long as the busiest link needs for its bytes, and no longer if
the messages on that link are of equal size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.plan import Moves, Round
from shardscope.analytic.communication.ring import Floats, Ints
from shardscope.spec.cluster.emulated import PAYLOAD, EmulatedCluster


@dataclass(frozen=True)
class Network:
    """Links of a cluster, which may differ in rate and may be shared by several ranks.

    Attributes:
        names: Names of the links.
        capacity: Bytes per second of each link.
        node_of: Node of each rank.
        rack_of: Rack of each node.
        ranks: Links of each rank inside its node, out and in; shape `(2, W)`.
        nodes: Links of each node, out and in; shape `(2, nodes)`.
        racks: Links of each rack, out and in; shape `(2, racks)`.
    """

    names: tuple[str, ...]
    capacity: Floats
    node_of: Ints
    rack_of: Ints
    ranks: Ints
    nodes: Ints
    racks: Ints

    @classmethod
    def of(cls, cluster: EmulatedCluster, *, efficiency: float = 1.0, memory: float = inf) -> Network:
        """Return the links of an emulated cluster.

        Args:
            cluster: The cluster.
            efficiency: Fraction of the links' rates that messages reach.
            memory: Bytes per second that a rank can send to, or receive from, ranks of its own node.
        """
        nodes, per_node = range(len(cluster.nodes)), cluster.per_node
        racks = range(cluster.racks) if cluster.racks > 1 else range(0)
        share = efficiency * PAYLOAD
        uplink = inf if cluster.rack_bandwidth is None else share * cluster.rack_bandwidth
        rows: list[tuple[str, float]] = []

        def add(pairs: Iterable[tuple[str, float]]) -> Ints:
            first = len(rows)
            rows.extend(pairs)
            return np.arange(first, len(rows))

        ends = [("out", "upload"), ("in", "download")]
        ranks = [
            add((f"rank {rank}, {way}", memory) for rank in range(cluster.num_devices)) for way, _ in ends
        ]
        own = [
            add((f"node {n}, {way}", min(share * getattr(cluster.nodes[n], rate), per_node * memory)) for n in nodes)
            for way, rate in ends
        ]  # fmt: skip
        up = [add((f"rack {rack}, {way}", uplink) for rack in racks) for way, _ in ends]
        names, capacity = zip(*rows, strict=True)
        return cls(
            names=names, capacity=np.array(capacity), node_of=np.arange(cluster.num_devices) // per_node,
            rack_of=np.array([cluster.rack_of(node) for node in nodes]), ranks=np.stack(ranks), nodes=np.stack(own),
            racks=np.stack(up),
        )  # fmt: skip

    @classmethod
    def even(cls, ranks: int, bandwidth: float) -> Network:
        """Return the links of ranks that each send and receive at the same rate, in bytes per second."""
        links = np.arange(2 * ranks).reshape(2, ranks)
        names = tuple(f"rank {rank}, {way}" for way in ("out", "in") for rank in range(ranks))
        nobody = np.zeros((2, 0), np.int64)
        return cls(
            names,
            np.full(2 * ranks, bandwidth),
            np.arange(ranks),
            np.zeros(ranks, np.int64),
            links,
            links,
            nobody,
        )

    @property
    def width(self) -> int:
        """Largest number of links that a message occupies: 2, or 4 if there are racks."""
        return 4 if self.racks.size else 2

    def ways(self, source: Ints, target: Ints) -> Ints:
        """Return the links that messages occupy, -1 for none; shape `(n, width)`."""
        start, end = self.node_of[source], self.node_of[target]
        is_near = start == end
        first = np.where(is_near, self.ranks[0, source], self.nodes[0, start])
        last = np.where(is_near, self.ranks[1, target], self.nodes[1, end])
        if not self.racks.size:
            return np.stack([first, last], axis=1)
        start, end = self.rack_of[start], self.rack_of[end]
        is_near = start == end
        up, down = (np.where(is_near, -1, self.racks[k, rack]) for k, rack in enumerate((start, end)))
        return np.stack([first, up, down, last], axis=1)

    def loads(self, moves: Moves) -> Floats:
        """Return the bytes that messages put on each link."""
        found = np.zeros(len(self.names))
        for links in self.ways(moves.source, moves.target).T:
            used = links >= 0
            np.add.at(found, links[used], moves.num_bytes[used])
        return found

    def seconds(self, levels: Sequence[Level], slices: int = 1) -> float:
        """Return the time of a collective in seconds.

        The first slice passes level after level, each of which takes as long as its busiest link; in a level with a
        lag, the first `lag` slices do so. All other slices follow at the rate of the link that is busiest over all
        levels. This is exact if one link is the busiest in every level, as in a ring, or if there is one level;
        otherwise, messages of different levels may overlap a little more or less.
        """
        alone = sum(self._seconds(each.bytes) * min(max(1, each.lag), slices) for each in levels)
        together = self._seconds(sum((each.bytes for each in levels), np.zeros(len(self.names))))
        return alone / slices + together * (1 - 1 / slices)

    def _seconds(self, num_bytes: Floats) -> float:
        return float((num_bytes / self.capacity).max())


class Level(NamedTuple):
    """Messages of a collective that are sent at the same time."""

    bytes: Floats
    """Bytes on each link."""
    lag: int = 0
    """Largest `Round.lag` of the messages."""


def levels_of(network: Network, rounds: Iterable[Round]) -> list[Level]:
    """Divide the messages of a collective into levels: each is in the first level in which its sender can send it.

    A rank sends in a round after it has sent and received its messages of earlier rounds, so ranks that take no part in
    a round get ahead.
    """
    ready, found = np.zeros(len(network.node_of), np.int64), list[Level]()
    for each in rounds:
        moves = Moves.of(each)
        at = ready[moves.source]
        for level in np.unique(at):
            mine = at == level
            part = Moves(each.name, moves.source[mine], moves.target[mine], moves.num_bytes[mine])
            found += [Level(np.zeros(len(network.names)))] * (level + 1 - len(found))
            before = found[level]
            found[level] = Level(before.bytes + network.loads(part), max(before.lag, each.lag))
        np.maximum.at(ready, moves.source, at + 1)
        np.maximum.at(ready, moves.target, at + 1)
    return found
