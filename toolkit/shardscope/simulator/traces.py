"""Traces of simulated steps for other tools: Chrome traces and Chakra execution traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardscope.errors import SpecError
from shardscope.runlog.chakra import (
    COMPUTE,
    RECEIVE,
    SEND,
    TraceNode,
    write_nodes,
)
from shardscope.runlog.chrome_trace import write_trace
from shardscope.simulator.graph import Graph
from shardscope.simulator.result import Simulation

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
        SpecError: Several replicas were simulated, whose synchronisation the format cannot describe.
    """
    if len(found.done.copies) > 1:
        raise SpecError(
            "format='chakra' needs a step whose replicas are all equal; simulate it without jitter and stragglers"
        )
    graph, times = found.done.graph, found.done.times
    after: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for before, then in zip(graph.edges[::2], graph.edges[1::2], strict=True):
        after[then].append(before)
    if any(graph.shifts):
        raise SpecError(
            "format='chakra' needs every single message, but equal ranks were simulated as one; use the "
            "ranks' original traces, or use format='chrome-trace'"
        )
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
    """Return each operation's dependencies on nodes of its own lane.

    A dependency on a message from another lane is replaced by the node that receives the message. That node also stands
    for the dependency of a message that waits until its receiver is ready.

    Raises:
        SpecError: Ranks synchronise without sending messages, as in a collective that was simulated as a whole.
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
                    f"format='chakra' needs every single message, but {graph.lanes[graph.op_lane[op]]} waits for "
                    f"{graph.lanes[graph.op_lane[other]]} in a collective that was simulated as a whole; use fewer "
                    "ranks, or a strategy that lists its messages"
                )
        found.append(own)
    return found


FORMATS: Mapping[str, Callable[[Simulation, str | Path], str]] = {
    "chrome-trace": write_chrome,
    "chakra": write_chakra,
}
