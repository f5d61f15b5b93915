"""Collectives as operations of a graph: one message for each move of each round, in slices if they are pipelined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shardscope.analytic.communication.plan import Round
from shardscope.prediction.simulate.graph import JOIN, Graph


class Wire(NamedTuple):
    """The way of a message from one rank to another: its latency in seconds, and its links."""

    latency: float
    links: tuple[int, ...]


Wires = Callable[[int, int], Wire]


def add_rounds(
    graph: Graph,
    rounds: Iterable[Round],
    entry: Sequence[int],
    wires: Wires,
    kind: str,
    *,
    slices: int = 1,
    cargo: str = "",
    serial: bool = True,
    one_by_one: bool = False,
) -> list[int]:
    """Add the messages of a collective, and return for each rank the operation that ends it.

    A rank sends in a round after it has sent and received its messages of the rounds before. If messages are cut into
    slices, this holds for each slice, so that a slice can travel on while the next one arrives.

    Args:
        graph: The graph; its lanes are ranks.
        rounds: The rounds of the collective.
        entry: For each rank, the operation after which it takes part.
        wires: Function that returns the wire between two ranks.
        kind: Term to which the time belongs.
        slices: Number of slices of each message.
        cargo: What the messages carry.
        serial: Whether ranks compute nothing meanwhile.
        one_by_one: Whether a rank sends the messages of a round one after another, so that their latencies add up, as
            they do if the latency is mostly the sender's own work. Otherwise it sends them at the same time.
    """
    last: list[list[int]] = [[op] * slices for op in entry]
    for each in rounds:
        found: dict[int, list[list[int]]] = {}
        sent: dict[int, int] = {}
        for move in each.moves:
            wire = wires(move.source, move.target)
            before = sent.get(move.source, -1) if one_by_one else -1
            item = f"{move.item} of the {cargo}" if move.item else cargo
            for k in range(slices):
                before = graph.add(
                    move.source, kind, wire.latency, size=move.num_bytes / slices, links=wire.links,
                    after=(last[move.source][k], entry[move.target], before), serial=serial, label=item,
                    peer=move.target,
                )  # fmt: skip
                for rank in (move.source, move.target):
                    found.setdefault(rank, [[] for _ in range(slices)])[k].append(before)
            sent[move.source] = before
        for rank, ops in found.items():
            last[rank] = [_joined(graph, rank, same) for same in ops]
    return [_joined(graph, rank, [*dict.fromkeys(ops)]) for rank, ops in enumerate(last)]


def _joined(graph: Graph, rank: int, ops: Sequence[int]) -> int:
    """Return an operation that ends when all of these have ended."""
    return ops[0] if len(ops) == 1 else graph.add(rank, JOIN, after=ops)
