"""Traces of simulated steps for other tools, and the simulation of Chakra execution traces from other tools."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardscope.errors import SpecError, unknown_name
from shardscope.prediction.simulate.breakdown import busy_seconds, lane_seconds, term_tree
from shardscope.prediction.simulate.collective import equal_wires, expanded
from shardscope.prediction.simulate.graph import JOIN, Graph
from shardscope.prediction.simulate.kineto import read_kineto
from shardscope.prediction.simulate.queues import run_in_order
from shardscope.prediction.simulate.replicas import Variation, replicate
from shardscope.prediction.simulate.result import Simulation
from shardscope.prediction.simulate.rounds import add_rounds
from shardscope.runlog.chakra import (
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    RECEIVE,
    SEND,
    TraceNode,
    read_nodes,
    tensor_bytes,
    write_nodes,
)
from shardscope.runlog.chrome_trace import write_trace
from shardscope.spec.link import Link
from shardscope.spec.look import Arrangement

_US = 1e6


def write_chrome(found: Simulation, path: str | Path) -> str:
    """Write the events of each rank as a Chrome trace, and return the path."""
    import pandas as pd

    step = found.timeline
    rows = [(e.rank, step.step, e.lane, e.kind, e.start_s, e.end_s, e.num_bytes) for e in step.events]
    spans = pd.DataFrame(rows, columns=["rank", "step", "lane", "name", "start_s", "end_s", "bytes"])
    return write_trace(spans, path, {"simulated": found.label, "merged": " ".join(found.merged)})


def write_chakra(found: Simulation, path: str | Path) -> str:
    """Write one Chakra file for each lane, ``PATH.0.et`` and so on, and return the path.

    Every message is a sending node on one rank and a receiving node on the other. A collective that was simulated as
    one message is a computation of its duration, because its ranks are merged.

    Raises:
        SpecError: Several replicas were simulated, whose meetings the format cannot describe.
    """
    if len(found.done.copies) > 1:
        raise SpecError(
            "format='chakra' needs a step whose replicas are alike; simulate it without jitter and stragglers"
        )
    graph, times = found.done.graph, found.done.times
    after: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for before, then in zip(graph.edges[::2], graph.edges[1::2], strict=True):
        after[then].append(before)
    files: list[list[TraceNode]] = [[] for _ in graph.lanes]
    resolved = _across_lanes(graph, after)
    for op in range(graph.num_ops):
        lane, peer = graph.op_lane[op], graph.peers[op]
        start, seconds = times.start[op], times.end[op] - times.start[op]
        clock = {"start_us": round(start * _US), "duration_us": round(seconds * _US)}
        name, waits = graph.kinds[op] or "join", tuple(resolved[op])
        about: dict[str, int | bool] = {"is_cpu_op": False}
        if peer >= 0:
            size = round(graph.payload[op])
            about |= {"comm_size": size, "comm_src": lane, "comm_dst": peer, "comm_tag": op}
            files[peer].append(TraceNode(graph.num_ops + op, name, RECEIVE, (), **clock, attributes=about))
        elif not graph.is_serial[op]:
            about["stream"] = 1 + op  # one of its own, so that it overlaps with others again
        files[lane].append(
            TraceNode(op, name, SEND if peer >= 0 else COMPUTE, waits, **clock, attributes=about)
        )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    for lane, nodes in enumerate(files):
        write_nodes(Path(f"{path}.{lane}.et"), nodes)
    return str(path)


def _across_lanes(graph: Graph, after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return each operation's dependencies within its lane: messages from other lanes as their receiving nodes.

    A message may also wait until its receiver is ready, which the receiving node stands for.

    Raises:
        SpecError: Ranks meet without sending messages, as in a collective that was simulated as a whole.
    """
    found = []
    for op, before in enumerate(after):
        own = []
        for other in before:
            if graph.op_lane[other] == graph.op_lane[op]:
                own.append(other)
            elif graph.peers[other] == graph.op_lane[op]:
                own.append(graph.num_ops + other)
            elif graph.peers[op] != graph.op_lane[other]:
                raise SpecError(
                    f"format='chakra' needs all messages one by one, but {graph.lanes[graph.op_lane[op]]} waits for "
                    f"{graph.lanes[graph.op_lane[other]]} in a collective that was simulated as a whole; use fewer "
                    "ranks, or a strategy that lists its messages"
                )
        found.append(own)
    return found


FORMATS: Mapping[str, Callable[[Simulation, str | Path], str]] = {
    "chrome-trace": write_chrome,
    "chakra": write_chakra,
}


_Messages = dict[tuple[int, int, int], deque[tuple[int, TraceNode]]]
"""Ranks and nodes by source, destination and tag, in the order in which sends and receives are matched."""
_BEGIN, _END = "begin", "end"
ALGORITHMS: Mapping[str, str] = {
    "all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring", "all_to_all": "pairwise", "broadcast": "tree",
}  # fmt: skip
"""Algorithm of each type of collective, unless another one is asked for."""


@dataclass
class _Replay:
    """Builds the graph of Chakra traces, one lane per rank."""

    traces: Sequence[Sequence[TraceNode]]
    link: Link
    algorithms: Mapping[str, str]
    """Algorithm of each type of collective."""
    calls: dict[tuple[Any, int], dict[int, TraceNode]] = field(default_factory=dict)
    """Collectives by process group and number: on each rank, the node that takes part."""
    sends: _Messages = field(default_factory=dict)
    receives: _Messages = field(default_factory=dict)
    streams: list[dict[tuple[bool, Any], list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = range(len(self.traces))
        self.graph = graph = Graph([f"rank {rank}" for rank in ranks])
        self.wires = equal_wires(graph, len(ranks), self.link.bandwidth, self.link.latency_s)
        self.traces = [sorted(nodes, key=lambda node: node.id) for nodes in self.traces]
        self.ops = [
            {node.id: graph.add(rank) for node in self.traces[rank]} for rank in ranks
        ]  # the end of each node
        # A name lets a beginning count as the rank's first operation; a rank that only waits has not begun its step.
        self.begin = [
            {node.id: graph.add(rank, JOIN if node.type == RECEIVE else _BEGIN) for node in self.traces[rank]}
            for rank in ranks
        ]
        self.streams = [{} for _ in ranks]
        for rank in ranks:
            self._add_nodes(rank)
        self._match()
        self._check_members()
        for (group, number), together in self.calls.items():
            _check_alike(group, number, together)
            self._collective(together)
        run_in_order(graph, [ops for streams in self.streams for ops in streams.values()])
        for rank in ranks:
            self._finish(rank)

    def _add_nodes(self, rank: int) -> None:
        numbers: Counter[Any] = Counter()
        for node in self.traces[rank]:
            self._order(rank, node)
            key = tuple(int(node.attributes.get(name, 0)) for name in ("comm_src", "comm_dst", "comm_tag"))
            if node.type == COLLECTIVE:
                group = node.attributes.get("pg_name", "")
                self.calls.setdefault((group, numbers[group]), {})[rank] = node
                numbers[group] += 1
            elif node.type == SEND:
                self.sends.setdefault(key, deque()).append((rank, node))  # type: ignore[arg-type]
            elif node.type == RECEIVE:
                self.graph.order(self.begin[rank][node.id], self.ops[rank][node.id])
                self.receives.setdefault(key, deque()).append((rank, node))  # type: ignore[arg-type]
            else:
                self._compute(rank, node)

    def _compute(self, rank: int, node: TraceNode) -> None:
        op = self.graph.add(rank, node.name or "unnamed", node.duration_us / _US, serial=False)
        self._between(rank, node, op)
        if node.type == COMPUTE and node.duration_us > 0:
            on_host = bool(node.attributes.get("is_cpu_op", False))
            stream = node.attributes.get("tid" if on_host else "stream", 0)
            self.streams[rank].setdefault((on_host, stream), []).append(op)

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

    def _order(self, rank: int, node: TraceNode) -> None:
        for other in node.after:
            if other not in self.ops[rank]:
                raise SpecError(
                    f"node {node.id} of rank {rank} depends on node {other}, which its trace does not have"
                )
            self.graph.order(self.ops[rank][other], self.begin[rank][node.id])

    def _between(self, rank: int, node: TraceNode, op: int) -> None:
        self.graph.order(self.begin[rank][node.id], op)
        self.graph.order(op, self.ops[rank][node.id])

    def _match(self) -> None:
        """Add the message of each send and its receive: with equal tags, the first to the first, and so on."""
        pairs: list[tuple[tuple[int, TraceNode], tuple[int, TraceNode]]] = []
        for key, sends in self.sends.items():
            receives = self.receives.get(key, deque())
            pairs += zip(sends, receives, strict=False)
            if len(sends) > len(receives):
                rank, node = sends[len(receives)]
                raise SpecError(
                    f"node {node.id} of rank {rank} sends a message to rank {key[1]} with tag {key[2]}, but no rank "
                    "receives it; give the traces of all ranks, with a receive for each send"
                )
        for key, receives in self.receives.items():
            sends = self.sends.get(key, deque())
            if len(receives) > len(sends):
                rank, node = receives[len(sends)]
                raise SpecError(
                    f"node {node.id} of rank {rank} receives a message from rank {key[0]} with tag {key[2]}, but no "
                    "rank sends it; give the traces of all ranks, with a send for each receive"
                )
        self._add_messages(pairs)

    def _add_messages(self, pairs: Sequence[tuple[tuple[int, TraceNode], tuple[int, TraceNode]]]) -> None:
        source, target = (np.array([each[side][0] for each in pairs], np.int64) for side in range(2))
        wire = self.wires(source, target)
        first = self.graph.add_many(
            source, [sent.name or "unnamed" for (_, sent), _ in pairs], wire.latency,
            size=np.array([sent.attributes.get("comm_size", 0) for (_, sent), _ in pairs], float), links=wire.links,
            peers=target, serial=False,
        )  # fmt: skip
        for op, ((rank, sent), (other, received)) in enumerate(pairs, first):
            self._between(rank, sent, op)
            self.graph.order(op, self.ops[other][received.id])

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

    def expansions(self) -> str:
        """Return the algorithms of the trace's collectives as a clause."""
        numbers = (
            next(iter(together.values())).attributes.get("comm_type", 0) for together in self.calls.values()
        )
        ops = dict.fromkeys(COLLECTIVES[int(number)] for number in numbers)
        used = [f"{op} is {self.algorithms[op]}" for op in ops if op in self.algorithms]
        return f"; {', '.join(used)}" if used else ""

    def _collective(self, together: Mapping[int, TraceNode]) -> None:
        """Add a collective over the ranks that call it."""
        members = sorted(together)
        first = together[members[0]]
        number, size = (int(first.attributes.get(name, 0)) for name in ("comm_type", "comm_size"))
        op = COLLECTIVES.get(number)
        if op is None:
            known = ", ".join(COLLECTIVES.values())
            raise SpecError(f"comm_type={number} of {first.name!r} is not simulated; use {known}")
        entry = [self.begin[rank][together[rank].id] for rank in members]
        if op == "barrier":
            ends = [self.graph.add(members[0], after=entry)] * len(members)
        else:
            whole = tensor_bytes(number, size, len(members))
            rounds = expanded(op, self.algorithms[op], whole, len(members))
            lanes = np.array(members)
            ends = add_rounds(self.graph, rounds, entry, self.wires, first.name or op, lanes=lanes)
        for rank, end in zip(members, ends, strict=True):
            self.graph.order(end, self.ops[rank][together[rank].id])


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
    """Return the ranks that the name of a group says it has: all for the default one, or a list such as ``[0, 1]``."""
    if group == "":
        return set(range(num_ranks))
    listed = re.fullmatch(r"\[(\d+(?:, *\d+)*)\]", str(group))
    return {int(rank) for rank in listed[1].split(",")} if listed else set()


def _called(group: Any) -> str:
    return f"the group pg_name={group!r}" if group != "" else "the default group"


def read_chakra(paths: Sequence[str | Path]) -> list[list[TraceNode]]:
    """Return the nodes of Chakra traces, one file per rank, in the order of ranks."""
    return [list(read_nodes(Path(path))) for path in paths]


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
    replay = _Replay(kind.read(paths), link, {**ALGORITHMS, **(algorithms or {})})
    ranks = [[rank] for rank in range(len(paths))]
    variation.check(len(ranks))
    done = replicate(replay.graph, [0], [], ranks, variation)
    seconds: dict[str, Any] = lane_seconds(done, int(busy_seconds(done).argmax()), "waiting for other ranks")
    return Simulation(
        label=f"{kind.name} trace {Path(paths[0]).name}", num_devices=len(ranks), time=term_tree(seconds, {}, ()),
        merged=(f"All ranks send over equal links{replay.expansions()}.",), lane_ranks=tuple(map(tuple, ranks)),
        done=done, arrangement=Arrangement(),
    )  # fmt: skip
