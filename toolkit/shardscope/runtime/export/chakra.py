"""One step of a run as MLCommons Chakra execution traces, one file per rank.

The step is the one whose messages were recorded: each message is a sending and a receiving node. Collectives whose
messages the backend does not report are collective nodes, with the ranks of their group if they are on one axis of a
mesh. Computations have their durations in a typical step, because recording messages and memory makes that step slower.
Where a rank computes and communicates at the same time, the time counts as communication, as in `compare`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from shardscope.errors import SpecError
from shardscope.methods.strategies.mesh import Mesh
from shardscope.runlog.axes import axis_of
from shardscope.runlog.chakra import (
    COLLECTIVE,
    COLLECTIVES,
    RECEIVE,
    SEND,
    TraceNode,
    input_bytes,
    write_nodes,
)
from shardscope.runlog.schema import Event
from shardscope.runlog.spans import finished_steps
from shardscope.runlog.steps import WARM_UP_STEPS
from shardscope.runlog.trace_nodes import Call, ComputeSpan, nodes_of, without

if TYPE_CHECKING:
    from shardscope.runtime.record.run import Run
    from shardscope.spec import Job

_PASSES = frozenset({"forward", "backward"})
_BETWEEN_STAGES = frozenset({"send", "recv"})
"""Spans that overlap with passes: a pipeline's messages travel while its stages compute."""
_Message = tuple[int, int, str, int, float, float]
"""Source, destination, collective, bytes, and the times at which a message is sent and has arrived."""


def write_chakra(run: Run, path: str | Path) -> str:
    """Write one Chakra file for each rank, ``PATH.0.et`` and so on, and return the path.

    Raises:
        SpecError: No step with spans has been finished by all ranks, a collective has no counterpart in the format, or
            the library ``protobuf`` is not installed.
    """
    files = trace_of(run)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    for rank, nodes in enumerate(files):
        write_nodes(Path(f"{path}.{rank}.et"), nodes)
    return str(path)


def trace_of(run: Run) -> list[list[TraceNode]]:
    """Return the nodes of each rank; see `write_chakra`."""
    events = run.events()
    steps = {
        number: rows
        for number, rows in finished_steps(events, run.job.world_size).items()
        if all(row.get("spans") for row in rows)
    }
    if not steps:
        raise SpecError(
            f"run {run.id} has no finished step with spans; launch it with Record(spans_first=100), for example"
        )
    step, messages = _chosen(run, steps, [event for event in events if event["event"] == "messages"])
    typical = [_seconds(rows) for number, rows in sorted(steps.items())][WARM_UP_STEPS:] or [
        _seconds(steps[step])
    ]
    scales = _scales(_seconds(steps[step]), typical)
    tags = {name: tag for tag, name in enumerate(sorted({message[2] for message in messages}))}
    zero = min(start for row in steps[step] for _, _, start, _, _ in row["spans"])
    return [
        _scaled(nodes_of(_pieces(row), _calls(row, messages, tags, run.job), zero=zero), scales[rank])
        for rank, row in enumerate(steps[step])
    ]


def _chosen(
    run: Run, steps: Mapping[int, Sequence[Event]], logs: Sequence[Event]
) -> tuple[int, list[_Message]]:
    """Return the step to export and its messages: the step with recorded messages, else the first after warm-up.

    A step is not exported if a collective ended after the step, because the collective's span is in the next step.

    Raises:
        SpecError: No step has the spans or messages of all its collectives.
    """
    logged = {int(event["step"]) for event in logs}
    for step in sorted(steps, key=lambda number: (number not in logged, number <= WARM_UP_STEPS, number)):
        messages = list(_messages(event for event in logs if event["step"] == step))
        names = {message[2] for message in messages}
        if _are_whole(steps[step], names):
            return step, messages
    raise SpecError(
        f"run {run.id} has no step with the messages or spans of all its collectives; launch it with "
        "Record(messages_first=3)"
    )


def _are_whole(rows: Sequence[Event], logged: set[str]) -> bool:
    """Return whether each rank has a span for every collective that it called, apart from those with recorded messages.

    All ranks must also have called each collective the same number of times.
    """
    names = [[name for lane, name, *_ in row["spans"] if lane == "communication"] for row in rows]
    counts = [Counter(name for name in own if name not in logged) for own in names]
    return all(own == counts[0] for own in counts) and all(
        own[name] == called["calls"]
        for row, own in zip(rows, counts, strict=True)
        for name, called in row["traffic"].items()
        if name not in logged
    )


def _messages(rows: Iterable[Event]) -> Iterator[_Message]:
    """Yield the recorded messages; the k-th to arrive from a rank in a collective is the k-th that it sent."""
    sent: list[tuple[int, Sequence[Any]]] = []
    arrivals: dict[tuple[str, int, int], deque[float]] = defaultdict(deque)
    for event in rows:
        for row in event["rows"]:
            if row[1] == "sent":
                sent.append((int(event["rank"]), row))
            else:
                arrivals[row[0], int(row[2]), int(event["rank"])].append(float(row[4]))
    for rank, (name, _, peer, size, at, *_rest) in sorted(sent, key=lambda each: each[1][4]):
        waiting = arrivals[name, rank, peer]
        if waiting:
            yield rank, int(peer), name, int(size), float(at), max(float(at), waiting.popleft())


def _pieces(row: Event) -> list[ComputeSpan]:
    """Return the spans in which a rank computes; forward and backward passes are cut where the rank communicates."""
    spans = [(lane, ComputeSpan(name, start, end)) for lane, name, start, end, _ in row["spans"]]
    calls = [
        (piece.start, piece.end)
        for lane, piece in spans
        if lane == "communication" and piece.name not in _BETWEEN_STAGES
    ]
    whole = [piece for lane, piece in spans if lane != "communication" and piece.name not in _PASSES]
    passes = [piece for lane, piece in spans if lane != "communication" and piece.name in _PASSES]
    busy = [*calls, *((piece.start, piece.end) for piece in whole)]
    return [*without(passes, busy), *whole]


def _seconds(rows: Sequence[Event]) -> list[dict[str, float]]:
    """Return the seconds that each rank computes in a step, by name."""
    found: list[dict[str, float]] = []
    for row in rows:
        seconds: dict[str, float] = defaultdict(float)
        for piece in _pieces(row):
            seconds[piece.name] += piece.end - piece.start
        found.append(dict(seconds))
    return found


def _scales(
    step: Sequence[Mapping[str, float]], typical: Sequence[Sequence[Mapping[str, float]]]
) -> list[dict[str, float]]:
    """Return by rank and name the median time of a computation in the typical steps, divided by its time in `step`."""
    return [
        {
            name: median(each[rank].get(name, 0.0) for each in typical) / seconds
            for name, seconds in own.items()
            if seconds > 0
        }
        for rank, own in enumerate(step)
    ]


def _scaled(nodes: Sequence[TraceNode], scales: Mapping[str, float]) -> list[TraceNode]:
    return [
        node if node.type in (SEND, RECEIVE, COLLECTIVE)
        else node._replace(duration_us=round(node.duration_us * scales.get(node.name, 1.0)))
        for node in nodes
    ]  # fmt: skip


def _calls(row: Event, messages: Sequence[_Message], tags: Mapping[str, int], job: Job) -> list[Call]:
    """Return a rank's messages, and its collectives whose messages were not recorded."""
    rank, found = int(row["rank"]), []
    spans = [
        (name, start, end, size) for lane, name, start, end, size in row["spans"] if lane == "communication"
    ]
    for source, target, name, size, sent, arrived in messages:
        about = {"comm_size": size, "comm_src": source, "comm_dst": target, "comm_tag": tags[name]}
        if source == rank:
            until = max((end for _, start, end, _ in spans if start <= sent <= end), default=sent)
            found.append(Call(name, SEND, sent, max(until, sent), about))
        if target == rank:
            found.append(Call(name, RECEIVE, sent, arrived, about))
    covered = [call for call in found if call.type == SEND] + [call for call in found if call.type == RECEIVE]
    for name, start, end, size in spans:
        at = [
            call.start if call.type == SEND else call.end
            for call in covered
            if axis_of(call.name) == axis_of(name)
        ]
        if name in _BETWEEN_STAGES or any(start <= moment <= end for moment in at):
            continue
        number, members = _type(name), _members(name, rank, job)
        ranks = len(members) or job.world_size
        about = {"comm_size": input_bytes(number, int(size), ranks), "comm_type": number}
        group = {"pg_name": str(members)} if members else {}
        found.append(Call(name, COLLECTIVE, start, end, about | group))
    return found


def _members(name: str, rank: int, job: Job) -> list[int]:
    """Return the ranks with which a rank calls a collective on an axis; none if its name has no axis."""
    axis = axis_of(name)
    if axis is None or not isinstance(job.strategy, Mesh):
        return []
    return next(group for group in job.strategy.groups(axis, job.world_size) if rank in group)


def _type(name: str) -> int:
    """Return Chakra's number for a collective.

    Raises:
        SpecError: The format has no number for it, or the simulator could not read it.
    """
    for number, known in COLLECTIVES.items():
        if name.endswith(known):
            return number
    raise SpecError(
        f"format='chakra' cannot describe the collective {name!r} as a whole, and its messages were not recorded; "
        "record them with Record(messages_first=3), or use format='chrome-trace'"
    )
