"""Collectives as operations of a graph: one message for each move of each round, in slices if they are pipelined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from shardscope.analytic.communication.plan import Moves, Round
from shardscope.simulator.graph import JOIN, Floats, Graph, Ints


class MessagePath(NamedTuple):
    """Path of a message from one rank to another: its latency in seconds, and its links."""

    latency: float
    links: tuple[int, ...]
    message_s: float = 0.0
    """Seconds for which a message keeps its sender busy: unlike latencies, they add up over several messages.
    """


class WireArrays(NamedTuple):
    """Paths of several messages, as arrays."""

    latency: Floats
    links: Ints
    """Shape `(n, width of the graph)`."""
    message_s: Floats | float = 0.0


Wires = Callable[[Ints, Ints], WireArrays]
"""Function that returns the paths of messages between sources and targets."""


Order = Literal["at once", "in turn", "shared"]
"""How a rank sends the messages of a round: all at the same time; one after another; or ``shared``: the sender's work
for each message one after another, but the bytes of all messages at the same time."""


def one_by_one_wires(wire: Callable[[int, int], MessagePath], width: int = 2) -> Wires:
    """Return the function that finds the paths of several messages, of at most `width` links, one by one."""

    def wires(source: Ints, target: Ints) -> WireArrays:
        found = [wire(a, b) for a, b in zip(source.tolist(), target.tolist(), strict=True)]
        links = [(*each.links, *([-1] * (width - len(each.links)))) for each in found]
        return WireArrays(
            np.array([each.latency for each in found]), np.array(links, np.int64).reshape(-1, width),
            np.array([each.message_s for each in found]),
        )  # fmt: skip

    return wires


def add_rounds(
    graph: Graph,
    rounds: Iterable[Round | Moves],
    entry: Sequence[int],
    wires: Wires,
    kind: str,
    *,
    slices: int = 1,
    cargo: str = "",
    serial: bool = True,
    order: Order = "at once",
    in_line: bool = False,
    lanes: Ints | None = None,
) -> list[int]:
    """Add the messages of a collective, and return for each rank the operation that ends it.

    A rank sends in a round after it has sent and received its messages of earlier rounds. If messages are cut into
    slices, this holds for each slice, so that a slice can travel on while the next one arrives.

    Args:
        graph: The graph.
        rounds: The rounds of the collective.
        entry: For each rank, the operation after which it takes part.
        wires: Function that returns the paths of messages between lanes.
        kind: Term to which the time belongs.
        slices: Number of slices of each message.
        cargo: What the messages carry.
        serial: Whether ranks compute nothing during the collective.
        order: How a rank sends the messages of a round; see `Order`.
        in_line: Whether a rank sends all slices of a round before those of its next round, instead of at the same
            time, and without waiting until the receivers take part. If all messages have the same size, this makes no
            difference.
        lanes: Lane of each rank; None if each lane has the number of its rank.
    """
    started = np.asarray(entry, np.int64)
    lane = np.arange(len(started)) if lanes is None else lanes
    last = [_Last(graph, started, lane, waits=not in_line) for _ in range(slices)]
    sent: dict[tuple[int, int], Ints] = {}
    ahead = np.full(len(started), -1, np.int64)
    for each in rounds:
        moves = Moves.of(each) if isinstance(each, Round) else each
        count = len(moves.source)
        if not count:
            continue
        source, target = lane[moves.source], lane[moves.target]
        wire = wires(source, target)
        before = _previous(moves.source)
        turn = _turns(before) if order == "shared" else 1
        first = graph.add_many(
            np.repeat(source, slices), kind, _fixed(wire, turn, slices),
            size=np.repeat(moves.num_bytes / slices, slices), links=np.repeat(wire.links, slices, axis=0),
            peers=np.repeat(target, slices), serial=serial,
            labels=_labels(each, cargo, slices),
        )  # fmt: skip
        ops = first + np.arange(count * slices).reshape(count, slices)
        graph.order_many(ops[:, :-1].ravel(), ops[:, 1:].ravel())
        if in_line:
            graph.order_many(ahead[moves.source], ops[:, 0])
            ahead[moves.source] = ops[:, -1]
        if order == "in turn":
            graph.order_many(np.where(before >= 0, ops[before, -1], -1), ops[:, 0])
        if isinstance(each, Round):
            _trail(graph, each, ops, sent)
        for k, own in enumerate(last):
            own.then(moves, ops[:, k])
    return [
        _joined(graph, int(lane[rank]), [op for own in last for op in own.of(rank)])
        for rank in range(len(started))
    ]


def _fixed(wire: WireArrays, turn: Ints | int, slices: int) -> Floats:
    """Return the fixed seconds of each slice of each message, given the position of the message among those of its
    sender.

    A slice arrives directly after the previous one, so the latency counts only for the first.
    """
    own = np.broadcast_to(wire.message_s * turn, wire.latency.shape)
    found = np.repeat(own[:, None], slices, axis=1)
    found[:, 0] += wire.latency
    return found.ravel()


def _trail(graph: Graph, each: Round, ops: Ints, sent: dict[tuple[int, int], Ints]) -> None:
    """Let slices of a round with a lag start after the slices that they follow; record the messages in `sent`."""
    for move, own in zip(each.moves, ops, strict=True):
        ahead = sent.get((move.target, move.source))
        if each.lag and ahead is not None:
            for k, op in enumerate(own.tolist()):
                graph.order(int(ahead[min(k + each.lag, len(ahead) - 1)]), op)
        sent[move.source, move.target] = own


def _labels(each: Round | Moves, cargo: str, slices: int) -> list[str]:
    """Return the text of each slice of each message; there are too many moves in arrays for individual texts."""
    if isinstance(each, Moves):
        return [cargo] * (len(each.source) * slices)
    items = (f"{move.item} of the {cargo}" if move.item else cargo for move in each.moves)
    return [item for item in items for _ in range(slices)]


def _previous(source: Ints) -> Ints:
    """Return for each move the previous move of the same source; -1 for none."""
    order = np.argsort(source, kind="stable")
    found = np.full(len(source), -1, np.int64)
    same = source[order[1:]] == source[order[:-1]]
    found[order[1:][same]] = order[:-1][same]
    return found


def _turns(before: Ints) -> Ints:
    """Return the position, from 1, of each move among those of its source, given the result of `_previous`."""
    found = np.ones(len(before), np.int64)
    for move in np.flatnonzero(before >= 0).tolist():
        found[move] = found[before[move]] + 1
    return found


class _Last:
    """The messages of each rank in its last round: at most two, or an operation that joins more than two."""

    def __init__(self, graph: Graph, started: Ints, lane: Ints, *, waits: bool) -> None:
        self.waits = waits
        self.graph, self.started, self.lane, self.one = graph, started, lane, started.copy()
        self.other, self._target = np.full((2, len(started)), -1, np.int64)

    def then(self, moves: Moves, ops: Ints) -> None:
        """Let the messages of a round start after the last messages of their sources, which they then replace."""
        source, target = moves.source, moves.target
        self.graph.order_many(self.one[source], ops)
        self.graph.order_many(self.other[source], ops)
        # A message to the same rank as the previous message starts after that, and thus after its target has entered.
        fresh = self._target[source] != target
        if self.waits:
            self.graph.order_many(self.started[target[fresh]], ops[fresh])
        self._target[target] = -1
        self._target[source] = target
        if max(np.bincount(source).max(), np.bincount(target).max()) == 1:
            self.one[target], self.other[target] = ops, -1
            both = np.zeros(len(self.started), bool)
            both[target] = True
            self.other[source] = np.where(both[source], self.one[source], -1)
            self.one[source] = ops
        else:
            self._gather(np.concatenate([source, target]), np.concatenate([ops, ops]))

    def _gather(self, ranks: Ints, ops: Ints) -> None:
        """Record `ops` as the last messages of these ranks; more than two messages of one rank are joined."""
        order = np.argsort(ranks, kind="stable")
        found = ops[order]
        taking, begin, counts = np.unique(ranks[order], return_index=True, return_counts=True)
        self.one[taking] = found[begin]
        self.other[taking] = np.where(counts > 1, found[np.minimum(begin + 1, len(found) - 1)], -1)
        for place in np.flatnonzero(counts > 2).tolist():
            rank, start = int(taking[place]), begin[place]
            self.one[rank] = self.graph.add(
                int(self.lane[rank]), JOIN, after=found[start : start + counts[place]].tolist()
            )
            self.other[rank] = -1

    def of(self, rank: int) -> list[int]:
        """Return the last messages of a rank."""
        return [op for op in (int(self.one[rank]), int(self.other[rank])) if op >= 0]


def _joined(graph: Graph, rank: int, ops: Sequence[int]) -> int:
    """Return an operation that ends when all of `ops` have ended."""
    own = [*dict.fromkeys(ops)]
    return own[0] if len(own) == 1 else graph.add(rank, JOIN, after=own)
