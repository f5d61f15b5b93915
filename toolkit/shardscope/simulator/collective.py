"""One collective as events: every message of every round, on links with a bandwidth and a latency."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardscope.analytic.communication.plan import (
    Move,
    Moves,
    Round,
    in_groups,
    pairwise_moves,
    ring_moves,
    ring_rounds,
)
from shardscope.errors import SpecError, unknown_name
from shardscope.simulator.graph import Graph, Ints, Times
from shardscope.simulator.rounds import WireArrays, Wires, add_rounds

Rounds = Iterable[Round] | Iterable[Moves]
Expansion = Callable[[str, int, int, Mapping[str, Any]], Rounds]
"""Function ``(num_bytes, workers, options)`` that returns the rounds of an operation."""


@dataclass(frozen=True)
class CollectiveRun:
    """A simulated collective.

    Attributes:
        seconds: Time until the last rank has finished, in seconds.
        num_messages: Number of messages.
        num_events: Number of events that were processed.
        graph: Graph of the messages.
        times: Start and end of each message.
    """

    seconds: float
    num_messages: int
    num_events: int
    graph: Graph
    times: Times


def collective(
    *,
    op: str = "all_reduce",
    algorithm: str,
    num_bytes: int,
    workers: int,
    bandwidth: float,
    latency: float = 0.0,
    segments: int = 1,
    **options: Any,
) -> CollectiveRun:
    """Simulate one collective message by message; ``ss.analytic.communication.collective_time`` is its closed form.

    Every worker has one link to send and one to receive, of `bandwidth` each. With ``hierarchical``, it has another
    pair inside its node.

    Args:
        op: ``all_reduce``; with ``ring`` also ``reduce_scatter`` or ``all_gather``, with ``tree`` also ``broadcast``,
            and with ``pairwise`` only ``all_to_all``.
        algorithm: ``ring``, ``tree`` (binomial), ``hierarchical``, ``parameter-server`` or ``pairwise``.
        num_bytes: Bytes of the whole tensor.
        workers: Number of workers.
        bandwidth: Bytes per second of each link.
        latency: Seconds per message.
        segments: Number of slices of each message, which travel one after another.
        options: ``per_node``, ``inner_bandwidth`` and ``inner_latency`` for ``hierarchical``; ``servers`` and
            ``dedicated`` for ``parameter-server``.

    Raises:
        SpecError: The algorithm is unknown, cannot run this operation, or has no such option.

    Example:
        >>> found = collective(algorithm="ring", num_bytes=10**9, workers=64, bandwidth=12.5e9, latency=5e-6)
        >>> round(found.seconds, 5)
        0.15813
    """
    rounds = expanded(op, algorithm, num_bytes, workers, options)
    ranks = workers + (int(options.get("servers", 1)) if options.get("dedicated") else 0)
    graph = Graph([f"rank {rank}" for rank in range(ranks)])
    wires = _wires(graph, ranks, bandwidth, latency, options)
    entry = [graph.add(rank) for rank in range(ranks)]
    add_rounds(graph, rounds, entry, wires, op, slices=segments)
    times = graph.run()
    return CollectiveRun(times.total, sum(peer >= 0 for peer in graph.peers), times.num_events, graph, times)


def expanded(
    op: str, algorithm: str, num_bytes: int, workers: int, options: Mapping[str, Any] | None = None
) -> Iterator[Moves]:
    """Return the rounds of a collective, as arrays.

    Raises:
        SpecError: The algorithm is unknown, cannot run this operation, or has no such option.
    """
    if algorithm not in _ALGORITHMS:
        raise unknown_name("algorithm", algorithm, [*_ALGORITHMS])
    if op not in _ALGORITHMS[algorithm]:
        able = [name for name, ops in _ALGORITHMS.items() if op in ops]
        other = f"use {' or '.join(map(repr, able))} for it, or " if able else ""
        raise SpecError(
            f"algorithm={algorithm!r} does not simulate op={op!r}; {other}use it for "
            f"{' or '.join(map(repr, _ALGORITHMS[algorithm]))}"
        )
    known, options = _OPTIONS.get(algorithm, frozenset()), options or {}
    for name in options.keys() - known:
        raise unknown_name(f"option of {algorithm!r}", name, sorted(known))
    rounds = _ALGORITHMS[algorithm][op](op, num_bytes, workers, options)
    return (Moves.of(each) if isinstance(each, Round) else each for each in rounds)


def equal_wires(graph: Graph, ranks: int, bandwidth: float, latency: float, place: str = "") -> Wires:
    """Add a link to send and one to receive for each rank, and return the wires between the ranks."""
    out, into = (
        np.array([graph.link(f"rank {rank}, {way}{place}", bandwidth) for rank in range(ranks)])
        for way in ("out", "in")
    )

    def wires(source: Ints, target: Ints) -> WireArrays:
        links = np.stack([out[source], into[target]], axis=1)
        return WireArrays(np.zeros(len(source)), links, np.full(len(source), latency))

    return wires


def _wires(graph: Graph, ranks: int, bandwidth: float, latency: float, options: dict[str, Any]) -> Wires:
    """Return the wires of workers with one duplex link each, and another one inside nodes if `per_node` is given."""
    across = equal_wires(graph, ranks, bandwidth, latency)
    if "per_node" not in options:
        return across
    per_node, inner = int(options["per_node"]), float(options.get("inner_bandwidth", bandwidth))
    inside = equal_wires(
        graph, ranks, inner, float(options.get("inner_latency", latency)), ", inside the node"
    )

    def wires(source: Ints, target: Ints) -> WireArrays:
        near, far = inside(source, target), across(source, target)
        together = source // per_node == target // per_node
        links = np.where(together[:, None], near.links, far.links)
        return WireArrays(near.latency, links, np.where(together, near.message_s, far.message_s))

    return wires


def _ring(op: str, num_bytes: int, workers: int, _options: Mapping[str, Any]) -> Rounds:
    return ring_moves(op, num_bytes, 1, workers)


def _pairwise(_op: str, num_bytes: int, workers: int, _options: Mapping[str, Any]) -> Rounds:
    return pairwise_moves(num_bytes, workers)


def _hierarchical(op: str, num_bytes: int, workers: int, options: Mapping[str, Any]) -> Rounds:
    if "per_node" not in options:
        raise SpecError(
            "algorithm='hierarchical' needs the number of workers per node; give per_node=8, for example"
        )
    per_node = int(options["per_node"])
    if workers % per_node:
        raise SpecError(f"per_node={per_node} does not divide workers={workers}; use a divisor")
    nodes = [tuple(range(first, first + per_node)) for first in range(0, workers, per_node)]
    across = [tuple(range(place, workers, per_node)) for place in range(per_node)]
    share = ring_rounds(op, num_bytes // per_node, 1, len(nodes))
    return (
        *in_groups(ring_rounds("reduce_scatter", num_bytes, 1, per_node), nodes),
        *in_groups(share, across),
        *in_groups(ring_rounds("all_gather", num_bytes, 1, per_node), nodes),
    )


def _tree(op: str, num_bytes: int, workers: int, _options: Mapping[str, Any]) -> Rounds:
    """Return the rounds over a binomial tree: in an all-reduce, whole tensors travel up to rank 0, then down."""
    distances = [1 << k for k in range((workers - 1).bit_length())]
    pairs = [(far, [(r, r + far) for r in range(0, workers - far, 2 * far)]) for far in distances]
    up = [Round(f"up, {far}", tuple(Move(b, a, num_bytes) for a, b in same)) for far, same in pairs]
    down = [Round(f"down, {far}", tuple(Move(a, b, num_bytes) for a, b in same)) for far, same in pairs[::-1]]
    return down if op == "broadcast" else up + down


def _server(_op: str, num_bytes: int, workers: int, options: Mapping[str, Any]) -> Rounds:
    servers = int(options.get("servers", 1))
    first = workers if options.get("dedicated") else 0
    share = num_bytes // servers
    pairs = [(w, first + s) for w in range(workers) for s in range(servers) if w != first + s]
    return (
        Round("push", tuple(Move(worker, server, share) for worker, server in pairs)),
        Round("pull", tuple(Move(server, worker, share) for worker, server in pairs)),
    )


_ALGORITHMS: dict[str, dict[str, Expansion]] = {
    "ring": dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), _ring),
    "tree": dict.fromkeys(("all_reduce", "broadcast"), _tree),
    "hierarchical": {"all_reduce": _hierarchical},
    "parameter-server": {"all_reduce": _server},
    "pairwise": {"all_to_all": _pairwise},
}
_OPTIONS = {
    "hierarchical": frozenset({"per_node", "inner_bandwidth", "inner_latency"}),
    "parameter-server": frozenset({"servers", "dedicated"}),
}
