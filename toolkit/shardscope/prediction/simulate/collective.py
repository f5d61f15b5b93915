"""One collective as events: every message of every round, on links with a bandwidth and a latency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardscope.analytic.communication.plan import Move, Round, in_groups, ring_rounds
from shardscope.errors import SpecError, unknown_name
from shardscope.prediction.simulate.graph import Graph, Times
from shardscope.prediction.simulate.rounds import Wire, Wires, add_rounds

Rounds = tuple[Round, ...]


@dataclass(frozen=True)
class CollectiveRun:
    """A simulated collective.

    Attributes:
        seconds: Time until the last rank has finished.
        num_messages: Number of messages.
        num_events: Number of events that were processed.
        graph: The messages.
        times: Their times.
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
        op: ``all_reduce``, or with ``ring`` also ``reduce_scatter`` or ``all_gather``.
        algorithm: ``ring``, ``tree`` (binomial), ``hierarchical`` or ``parameter-server``.
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
    if algorithm not in _ALGORITHMS:
        raise unknown_name("algorithm", algorithm, [*_ALGORITHMS])
    if algorithm != "ring" and op != "all_reduce":
        raise SpecError(f"op={op!r} is simulated with algorithm='ring' only; use it, or op='all_reduce'")
    known = _OPTIONS.get(algorithm, frozenset())
    for name in options.keys() - known:
        raise unknown_name(f"option of {algorithm!r}", name, sorted(known))
    ranks = workers + (int(options.get("servers", 1)) if options.get("dedicated") else 0)
    graph = Graph([f"rank {rank}" for rank in range(ranks)])
    wires = _wires(graph, ranks, bandwidth, latency, options)
    rounds = _ALGORITHMS[algorithm](op, num_bytes, workers, options)
    entry = [graph.add(rank) for rank in range(ranks)]
    add_rounds(graph, rounds, entry, wires, op, slices=segments)
    times = graph.run()
    return CollectiveRun(times.total, sum(peer >= 0 for peer in graph.peers), times.num_events, graph, times)


def _wires(graph: Graph, ranks: int, bandwidth: float, latency: float, options: dict[str, Any]) -> Wires:
    """Return the wires of workers with one duplex link each, and another one inside nodes if `per_node` is given."""
    out = [graph.link(f"rank {rank}, out", bandwidth) for rank in range(ranks)]
    into = [graph.link(f"rank {rank}, in", bandwidth) for rank in range(ranks)]
    if "per_node" not in options:
        return lambda a, b: Wire(latency, (out[a], into[b]))
    per_node, inner = int(options["per_node"]), float(options.get("inner_bandwidth", bandwidth))
    pause = float(options.get("inner_latency", latency))
    near = [graph.link(f"rank {rank}, out, inside the node", inner) for rank in range(ranks)]
    nearer = [graph.link(f"rank {rank}, in, inside the node", inner) for rank in range(ranks)]

    def wire(a: int, b: int) -> Wire:
        if a // per_node == b // per_node:
            return Wire(pause, (near[a], nearer[b]))
        return Wire(latency, (out[a], into[b]))

    return wire


def _ring(op: str, num_bytes: int, workers: int, _options: dict[str, Any]) -> Rounds:
    return ring_rounds(op, num_bytes, 1, workers)


def _hierarchical(op: str, num_bytes: int, workers: int, options: dict[str, Any]) -> Rounds:
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


def _tree(_op: str, num_bytes: int, workers: int, _options: dict[str, Any]) -> Rounds:
    """Return the rounds of an all-reduce over a binomial tree: whole tensors up to rank 0, and back down."""
    distances = [1 << k for k in range((workers - 1).bit_length())]
    up = [
        Round(f"up, {far}", tuple(Move(r + far, r, num_bytes) for r in range(0, workers - far, 2 * far)))
        for far in distances
    ]
    down = [
        Round(f"down, {far}", tuple(Move(r, r + far, num_bytes) for r in range(0, workers - far, 2 * far)))
        for far in reversed(distances)
    ]
    return (*up, *down)


def _server(_op: str, num_bytes: int, workers: int, options: dict[str, Any]) -> Rounds:
    servers = int(options.get("servers", 1))
    first = workers if options.get("dedicated") else 0
    share = num_bytes // servers
    pairs = [(w, first + s) for w in range(workers) for s in range(servers) if w != first + s]
    return (
        Round("push", tuple(Move(worker, server, share) for worker, server in pairs)),
        Round("pull", tuple(Move(server, worker, share) for worker, server in pairs)),
    )


_ALGORITHMS: dict[str, Callable[[str, int, int, dict[str, Any]], Rounds]] = {
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "parameter-server": _server,
}
_OPTIONS = {
    "hierarchical": frozenset({"per_node", "inner_bandwidth", "inner_latency"}),
    "parameter-server": frozenset({"servers", "dedicated"}),
}
