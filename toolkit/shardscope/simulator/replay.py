"""Simulation of a step from traces of its ranks: Chakra execution traces and those of torch.profiler."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardscope.analytic.communication.plan import Moves
from shardscope.errors import SpecError, unknown_name
from shardscope.runlog.chakra import (
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    RECEIVE,
    SEND,
    TraceNode,
    read_traces,
    tensor_bytes,
)
from shardscope.simulator.breakdown import busy_seconds, lane_seconds, term_tree
from shardscope.simulator.collective import equal_wires, expanded
from shardscope.simulator.graph import Graph
from shardscope.simulator.kineto import read_kineto
from shardscope.simulator.queues import run_in_order
from shardscope.simulator.replicas import Variation, replicate
from shardscope.simulator.result import Simulation
from shardscope.simulator.rounds import add_rounds
from shardscope.spec.link import Link
from shardscope.spec.look import Arrangement

_US = 1e6

_At = tuple[int, TraceNode]
"""A rank and one of its nodes."""
_Messages = dict[tuple[int, int, int], list[_At]]
"""Sends or receives by source, destination and tag, in the order in which they are matched."""
_BEGIN, _END, _UNNAMED = "begin", "end", "unnamed"
ALGORITHMS: Mapping[str, str] = {
    "all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring", "all_to_all": "pairwise", "broadcast": "tree",
}  # fmt: skip
"""Default algorithm of each type of collective."""


class _Uneven(Exception):
    """Raised for a collective in which the ranks do different things."""


@dataclass
class _Replay:
    """Builds the graph of the traces of a step, one lane per trace.

    If all ranks do the same at the same time, one trace represents all of them: in each round of a collective, all
    ranks send the same number of bytes, to the rank at the same distance.
    """

    traces: Sequence[Sequence[TraceNode]]
    link: Link
    algorithms: Mapping[str, str]
    """Algorithm of each type of collective."""
    together: int = 1
    """Number of ranks that each trace represents."""
    calls: dict[tuple[Any, int], dict[int, TraceNode]] = field(default_factory=dict)
    """Collectives by process group and number: on each rank, the node that takes part."""
    sends: _Messages = field(default_factory=dict)
    receives: _Messages = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = range(len(self.traces))
        name = "rank {}" if self.together == 1 else f"ranks 0 to {self.together - 1}"
        self.graph = graph = Graph([name.format(rank) for rank in ranks])
        self.wires = equal_wires(graph, len(ranks), self.link.bandwidth, self.link.latency_s)
        self.out, self.into = self.wires(np.arange(len(ranks)), np.arange(len(ranks))).links.T.tolist()
        self.traces = [sorted(nodes, key=lambda node: node.id) for nodes in self.traces]
        self.ops: list[dict[int, int]] = [{} for _ in ranks]  # operation with which each node ends
        self.entry: list[dict[int, int]] = [{} for _ in ranks]  # operation after which each node takes part
        self.streams: list[dict[tuple[bool, Any], list[int]]] = [{} for _ in ranks]
        for rank in ranks:
            self._collect(rank)
        matched = list(self._matched())
        self.receivers = {(rank, sent.id): other for (rank, sent), (other, _) in matched}
        if self.together == 1:
            self._check_members()
        for rank in ranks:
            self._add_nodes(rank)
            self._order_nodes(rank)
        for (source, sent), (target, received) in matched:
            graph.order(self.ops[source][sent.id], self.ops[target][received.id])
        for (group, number), together in self.calls.items():
            _check_alike(group, number, together)
            self._collective(together)
        run_in_order(graph, [ops for streams in self.streams for ops in streams.values()])
        for rank in ranks:
            self._finish(rank)

    def _collect(self, rank: int) -> None:
        """Collect the sends, receives and collectives of a rank."""
        numbers: Counter[Any] = Counter()
        for node in self.traces[rank]:
            if node.type == COLLECTIVE:
                group = node.attributes.get("pg_name", "")
                self.calls.setdefault((group, numbers[group]), {})[rank] = node
                numbers[group] += 1
            elif node.type in (SEND, RECEIVE):
                about = node.attributes  # which may leave out the node's own rank
                key = tuple(int(about.get(name, rank)) for name in ("comm_src", "comm_dst"))
                waiting = self.sends if node.type == SEND else self.receives
                waiting.setdefault((*key, int(about.get("comm_tag", 0))), []).append((rank, node))  # type: ignore[arg-type]

    def _matched(self) -> Iterator[tuple[_At, _At]]:
        """Yield each send and its receive; those with equal tags are matched in order.

        Raises:
            SpecError: A send has no receive, or a receive no send.
        """
        for key in {**self.sends, **self.receives}:
            sends, receives = self.sends.get(key, []), self.receives.get(key, [])
            yield from zip(sends, receives, strict=False)
            if len(sends) > len(receives):
                rank, node = sends[len(receives)]
                raise SpecError(
                    f"node {node.id} of rank {rank} sends a message to rank {key[1]} with tag {key[2]}, but no rank "
                    "receives it; give the traces of all ranks, with a receive for each send"
                )
            if len(receives) > len(sends):
                rank, node = receives[len(sends)]
                raise SpecError(
                    f"node {node.id} of rank {rank} receives a message from rank {key[0]} with tag {key[2]}, but no "
                    "rank sends it; give the traces of all ranks, with a send for each receive"
                )

    def _add_nodes(self, rank: int) -> None:
        """Add an operation for each node: the computation, the message, or the end of a receive or collective."""
        graph, ops, latency = self.graph, self.ops[rank], self.link.latency_s
        every = np.arange(len(self.traces))
        links = self.wires(np.full(len(every), rank), every).links.tolist()
        for node in self.traces[rank]:
            if node.type == SEND:
                peer = self.receivers[rank, node.id]
                size = float(node.attributes.get("comm_size", 0))
                ops[node.id] = graph.add(
                    rank,
                    node.name or _UNNAMED,
                    latency,
                    size=size,
                    links=links[peer],
                    peer=peer,
                    serial=False,
                )
            elif node.type in (RECEIVE, COLLECTIVE):
                ops[node.id] = graph.add(rank)
            else:
                op = ops[node.id] = graph.add(
                    rank, node.name or _UNNAMED, node.duration_us / _US, serial=False
                )
                if node.type == COMPUTE and node.duration_us > 0:
                    on_host = bool(node.attributes.get("is_cpu_op", False))
                    stream = node.attributes.get("tid" if on_host else "stream", 0)
                    self.streams[rank].setdefault((on_host, stream), []).append(op)

    def _order_nodes(self, rank: int) -> None:
        """Let each node start after those that it depends on.

        A rank begins its step when its first node other than a receive starts; a rank that only waits has not begun.
        Nodes that depend only on receives therefore begin with an operation that counts as an operation of the rank.
        """
        graph, ops = self.graph, self.ops[rank]
        waits = {node.id for node in self.traces[rank] if node.type == RECEIVE}
        for node in self.traces[rank]:
            start = ops[node.id]
            if node.type == COLLECTIVE:
                start = self.entry[rank][node.id] = graph.add(rank, _BEGIN)
            elif node.type != RECEIVE and waits.issuperset(node.after):
                start = graph.add(rank, _BEGIN)
                graph.order(start, ops[node.id])
            for other in node.after:
                if other not in ops:
                    raise SpecError(
                        f"node {node.id} of rank {rank} depends on node {other}, which its trace does not have"
                    )
                graph.order(ops[other], start)

    def _finish(self, rank: int) -> None:
        """Let the stream that computes longest occupy the rank, and end the rank's step with its last node."""
        graph = self.graph
        longest = max(
            self.streams[rank].values(), key=lambda ops: sum(graph.fixed[op] for op in ops), default=()
        )
        for op in longest:
            graph.is_serial[op] = True
        awaited = {other for node in self.traces[rank] for other in node.after}
        graph.add(rank, _END, after=[op for id_, op in self.ops[rank].items() if id_ not in awaited])

    def _check_members(self) -> None:
        """Raise a `SpecError` unless every rank of a group takes part in each of its collectives."""
        members: dict[Any, set[int]] = {}
        for (group, _), together in self.calls.items():
            members.setdefault(group, _named_members(group, len(self.traces))).update(together)
        for (group, number), together in self.calls.items():
            absent = sorted(members[group] - set(together))
            if absent:
                name = next(iter(together.values())).name
                raise SpecError(
                    f"collective {number + 1} of {_called(group)}, {name!r}, is called by ranks {sorted(together)} but "
                    f"not by ranks {absent}; give traces of the same step from all ranks, with pg_name if only some "
                    "ranks belong to a group"
                )

    def merged(self) -> tuple[str, ...]:
        """Return sentences on what is merged, and on the algorithms of the collectives."""
        numbers = (
            next(iter(together.values())).attributes.get("comm_type", 0) for together in self.calls.values()
        )
        ops = dict.fromkeys(COLLECTIVES[int(number)] for number in numbers)
        used = [f"{op} is {self.algorithms[op]}" for op in ops if op in self.algorithms]
        links = f"All ranks send over equal links{'; ' if used else ''}{', '.join(used)}."
        return (links, "All ranks do the same, so one is simulated.") if self.together > 1 else (links,)

    def _collective(self, together: Mapping[int, TraceNode]) -> None:
        """Add a collective over the ranks that call it."""
        members = sorted(together)
        first = together[members[0]]
        number, size = (int(first.attributes.get(name, 0)) for name in ("comm_type", "comm_size"))
        op = COLLECTIVES.get(number)
        if op is None:
            known = ", ".join(COLLECTIVES.values())
            raise SpecError(f"comm_type={number} of {first.name!r} is not simulated; use {known}")
        entry = [self.entry[rank][together[rank].id] for rank in members]
        count, name = len(members) * self.together, first.name or op
        if op == "barrier":
            ends = [self.graph.add(members[0], after=entry)] * len(members)
        else:
            rounds = expanded(op, self.algorithms[op], tensor_bytes(number, size, count), count)
            if self.together > 1:
                ends = [self._in_step(rounds, entry[0], name)]
            else:
                ends = add_rounds(self.graph, rounds, entry, self.wires, name, lanes=np.array(members))
        for rank, end in zip(members, ends, strict=True):
            self.graph.order(end, self.ops[rank][together[rank].id])

    def _in_step(self, rounds: Iterable[Moves], before: int, name: str) -> int:
        """Add the rounds of a collective of all ranks, and return the operation that ends it.

        Raises:
            _Uneven: The ranks do not all do the same in a round.
        """
        links, known, shift = (self.out[0], self.into[0]), None, None
        for moves in rounds:
            if known is None or any(a is not b for a, b in zip(moves[1:4], known[1:4], strict=True)):
                known, shift = moves, moves.shift(self.together)
            if shift is None:
                raise _Uneven
            before = self.graph.add(
                0, name, self.link.latency_s, size=float(moves.num_bytes[0]), links=links, after=(before,), peer=0,
                shift=shift,
            )  # fmt: skip
        return before


def _check_alike(group: Any, number: int, together: Mapping[int, TraceNode]) -> None:
    """Raise a `SpecError` unless all ranks call the same collective with the same bytes."""
    for name in ("comm_type", "comm_size"):
        given = {rank: int(node.attributes.get(name, 0)) for rank, node in sorted(together.items())}
        if len(set(given.values())) > 1:
            one = next(iter(together.values())).name
            raise SpecError(
                f"{name} of collective {number + 1} of {_called(group)}, {one!r}, differs between ranks: {given}; "
                "give traces of the same step from all ranks, in which each has the same collectives of the same size"
            )


def _named_members(group: Any, num_ranks: int) -> set[int]:
    """Return the ranks of a group by its name: all for the default group, or those of a list such as ``[0, 1]``."""
    if group == "":
        return set(range(num_ranks))
    listed = re.fullmatch(r"\[(\d+(?:, *\d+)*)\]", str(group))
    return {int(rank) for rank in listed[1].split(",")} if listed else set()


def _called(group: Any) -> str:
    return f"the group pg_name={group!r}" if group != "" else "the default group"


def read_chakra(paths: Sequence[str | Path]) -> list[list[TraceNode]]:
    """Return the nodes of Chakra traces, one file per rank, in the order of ranks."""
    return read_traces([Path(path) for path in paths])


class Format(NamedTuple):
    """A format of traces that can be simulated."""

    name: str
    read: Callable[[Sequence[str | Path]], list[list[TraceNode]]]
    """Function that returns the nodes of each rank."""
    such_as: str
    """Examples of file names."""


CHAKRA = Format("Chakra", read_chakra, "step.0.et and step.1.et")
KINETO = Format("Kineto", read_kineto, "rank0.json and rank1.json")


def simulate_files(
    kind: Format,
    paths: Sequence[str | Path],
    link: Link,
    variation: Variation,
    algorithms: Mapping[str, str] | None = None,
) -> Simulation:
    """Simulate the traces of one step over equal links; see `shardscope.simulate.chakra`.

    Raises:
        SpecError: There are no files, one of them cannot be read, or an operation has no such algorithm.
    """
    if not paths:
        raise SpecError(
            f"{kind.name.lower()} needs the trace of each rank; give a list of files, such as {kind.such_as}"
        )
    for op in algorithms or {}:
        if op not in ALGORITHMS:
            raise unknown_name("algorithms", op, ALGORITHMS)
    variation.check(len(paths))
    with _without_collector():
        replay = _built(kind.read(paths), link, {**ALGORITHMS, **(algorithms or {})}, variation)
        ranks = [[rank] for rank in range(len(paths))] if replay.together == 1 else [[*range(len(paths))]]
        done = replicate(replay.graph, [0], [], ranks, variation)
    if not np.max(done.times.end, initial=0.0) > 0:
        raise SpecError(
            f"the traces contain nothing that takes time; give {kind.name} traces of a training step"
        )
    seconds: dict[str, Any] = lane_seconds(done, int(busy_seconds(done).argmax()), "waiting for other ranks")
    return Simulation(
        label=f"{kind.name} trace {Path(paths[0]).name}", num_devices=len(paths), time=term_tree(seconds, {}, ()),
        merged=replay.merged(), lane_ranks=tuple(map(tuple, ranks)), done=done, arrangement=Arrangement(),
    )  # fmt: skip


def _built(
    traces: Sequence[Sequence[TraceNode]], link: Link, algorithms: Mapping[str, str], variation: Variation
) -> _Replay:
    """Return the graph of the traces, in which one rank represents all if all do the same."""
    if variation.is_none and len(traces) > 1 and _are_alike(traces) and _meet_all(traces[0], len(traces)):
        try:
            return _Replay(traces[:1], link, algorithms, len(traces))
        except _Uneven:
            pass  # as in a tree, or in a ring whose chunks are not of one size
    return _Replay(traces, link, algorithms)


def _meet_all(nodes: Sequence[TraceNode], num_ranks: int) -> bool:
    """Return whether a rank communicates, and only in groups that consist of exactly the ranks of the traces."""
    calls = [node for node in nodes if node.attributes.get("comm_size")]
    named = [_named_members(node.attributes.get("pg_name", ""), num_ranks) for node in calls]
    return bool(calls) and all(members in (set(), set(range(num_ranks))) for members in named)


def _are_alike(traces: Sequence[Sequence[TraceNode]]) -> bool:
    """Return whether all ranks have the same nodes, up to an offset of the ids, and no sends or receives."""
    first = traces[0]
    if not first or any(node.type in (SEND, RECEIVE) for node in first):
        return False
    return all(
        own is first
        or (
            len(own) == len(first)
            and all(
                _numbered(a, -first[0].id) == _numbered(b, -own[0].id)
                for a, b in zip(first, own, strict=True)
            )
        )
        for own in traces
    )


def _numbered(node: TraceNode, more: int) -> TraceNode:
    """Return the node with its ids shifted, and without its start time, which is not simulated."""
    return node._replace(id=node.id + more, after=tuple(other + more for other in node.after), start_us=0)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable Python's cyclic garbage collector, which would scan hundreds of thousands of new nodes repeatedly."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
