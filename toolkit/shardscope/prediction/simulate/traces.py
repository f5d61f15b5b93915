"""Traces of simulated steps for other tools, and the simulation of Chakra execution traces from other tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardscope.analytic.communication.plan import Move, Round, ring_rounds
from shardscope.errors import SpecError
from shardscope.prediction.simulate.breakdown import busy_seconds, lane_seconds, term_tree
from shardscope.prediction.simulate.chakra import (
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    RECEIVE,
    SEND,
    TraceNode,
    read_nodes,
    write_nodes,
)
from shardscope.prediction.simulate.graph import Graph
from shardscope.prediction.simulate.replicas import Variation, replicate
from shardscope.prediction.simulate.result import Simulation
from shardscope.prediction.simulate.rounds import Wire, add_rounds
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


@dataclass
class _Replay:
    """Builds the graph of Chakra traces, one lane per rank."""

    traces: Sequence[Sequence[TraceNode]]
    link: Link
    ops: list[dict[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = range(len(self.traces))
        self.graph = graph = Graph([f"rank {rank}" for rank in ranks])
        self.out = [graph.link(f"rank {rank}, out", self.link.bandwidth) for rank in ranks]
        self.into = [graph.link(f"rank {rank}, in", self.link.bandwidth) for rank in ranks]
        self.ops = [
            {node.id: graph.add(rank) for node in self.traces[rank]} for rank in ranks
        ]  # the end of each node
        self.begin = [{node.id: graph.add(rank) for node in self.traces[rank]} for rank in ranks]
        calls: dict[int, dict[int, TraceNode]] = {}
        sends: dict[tuple[int, int, int], tuple[int, TraceNode]] = {}
        receives: dict[tuple[int, int, int], int] = {}
        for rank, nodes in enumerate(self.traces):
            number = 0
            for node in nodes:
                self._order(rank, node)
                key = tuple(
                    int(node.attributes.get(name, 0)) for name in ("comm_src", "comm_dst", "comm_tag")
                )
                if node.type == COLLECTIVE:
                    calls.setdefault(number, {})[rank] = node
                    number += 1
                elif node.type == SEND:
                    sends[key] = (rank, node)  # type: ignore[index]
                elif node.type == RECEIVE:
                    receives[key] = self.ops[rank][node.id]  # type: ignore[index]
                else:
                    self._between(rank, node, graph.add(rank, node.name, node.duration_us / _US))
        for key, (rank, node) in sends.items():
            self._send(key, rank, node, receives)
        for together in calls.values():
            self._collective(together)

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

    def _send(
        self,
        key: tuple[int, int, int],
        rank: int,
        node: TraceNode,
        receives: Mapping[tuple[int, int, int], int],
    ) -> None:
        if key not in receives:
            raise SpecError(
                f"rank {rank} sends {key} (source, target, tag), but no rank receives it; read all ranks' files"
            )
        target = key[1]
        op = self.graph.add(
            rank, node.name, self.link.latency_s, size=float(node.attributes.get("comm_size", 0)),
            links=(self.out[rank], self.into[target]), peer=target, serial=False,
        )  # fmt: skip
        self._between(rank, node, op)
        self.graph.order(op, receives[key])

    def _collective(self, together: Mapping[int, TraceNode]) -> None:
        """Add a collective over the ranks that call it, as a ring or, for an all-to-all, in pairs."""
        members = sorted(together)
        first = together[members[0]]
        op = COLLECTIVES.get(int(first.attributes.get("comm_type", 0)))
        if op is None:
            given, known = first.attributes["comm_type"], ", ".join(COLLECTIVES.values())
            raise SpecError(f"comm_type={given} of {first.name!r} is not simulated; use {known}")
        size, count = int(first.attributes.get("comm_size", 0)), len(members)
        if op == "all_to_all":
            share = size // count
            rounds: Sequence[Round] = [
                Round("", tuple(Move(a, (a + k) % count, share) for a in range(count)))
                for k in range(1, count)
            ]
        else:
            rounds = ring_rounds(op, size, 1, count) if count > 1 else ()
        placed = [
            Round(
                each.name,
                tuple(m._replace(source=members[m.source], target=members[m.target]) for m in each.moves),
            )
            for each in rounds
        ]
        entry = [self.graph.add(rank) for rank in range(len(self.traces))]
        for rank, node in together.items():
            self.graph.order(self.begin[rank][node.id], entry[rank])
        ends = add_rounds(self.graph, placed, entry, self._wire, first.name or op)
        for rank, node in together.items():
            self.graph.order(ends[rank], self.ops[rank][node.id])

    def _wire(self, source: int, target: int) -> Wire:
        return Wire(self.link.latency_s, (self.out[source], self.into[target]))


def simulate_traces(paths: Sequence[str | Path], link: Link, variation: Variation) -> Simulation:
    """Simulate Chakra traces, one file per rank; see `shardscope.simulate.chakra`."""
    if not paths:
        raise SpecError(
            "chakra needs the trace of each rank; give a list of files, such as step.0.et and step.1.et"
        )
    replay = _Replay([list(read_nodes(Path(path))) for path in paths], link)
    ranks = [[rank] for rank in range(len(paths))]
    variation.check(len(paths))
    done = replicate(replay.graph, [0], [], ranks, variation)
    seconds: dict[str, Any] = lane_seconds(done, int(busy_seconds(done).argmax()), "waiting for other ranks")
    return Simulation(
        label=f"Chakra trace {Path(paths[0]).name}", num_devices=len(paths), time=term_tree(seconds, {}, ()),
        merged=("All ranks send over equal links; collectives are rings.",), lane_ranks=tuple(map(tuple, ranks)),
        done=done, arrangement=Arrangement(),
    )  # fmt: skip
