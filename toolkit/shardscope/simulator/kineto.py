"""Kineto traces, as `torch.profiler` exports them, as nodes of a step: computations and collectives of each rank.

On a GPU, kernels are computations, and NCCL's kernels the collectives, whose arguments give the sizes. On a CPU,
the operations that no other operation contains are computations, and Gloo's annotations the collectives, whose sizes
are the shapes of their inputs. Time between computations in which no collective is in progress belongs to the rank's
own program, and counts as computation too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from shardscope.errors import SpecError, quoted
from shardscope.foreign_file import parsed_json, unpacked
from shardscope.runlog.chakra import COLLECTIVE, COLLECTIVES, RECEIVE, SEND, TraceNode
from shardscope.runlog.spans import union
from shardscope.runlog.trace_nodes import Call, ComputeSpan, filled, nodes_of, without

_COMPUTING = "computation"
_US = 1e6
_MOST_US = 1e18
"""Largest accepted time of an event, in microseconds: thousands of years after 1970."""
_MOST_BYTES = 1 << 62
"""Largest size of a message, in bytes."""
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_SIZES = {
    "double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2,
    "char": 1, "byte": 1, "bool": 1, "unsigned char": 1, "signed char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "long int": 8, "short": 2,
}  # fmt: skip
"""Bytes of an element, by the names that the profiler uses."""
_NUMBERS = {name.replace("_", ""): number for number, name in COLLECTIVES.items()}
_Event = Mapping[str, Any]


class _Rank(NamedTuple):
    """The trace of one rank."""

    path: Path
    rank: int
    world_size: int
    events: Sequence[_Event]


def read_kineto(paths: Sequence[str | Path]) -> list[list[TraceNode]]:
    """Return the nodes of each rank, in the order of ranks.

    Raises:
        SpecError: A file is not a Kineto trace, a rank is missing, a size or a peer is not in the trace, or a
            collective is not supported.
    """
    ranks = sorted(
        (_read(Path(path), place, len(paths)) for place, path in enumerate(paths)), key=lambda r: r.rank
    )
    known, size = [each.rank for each in ranks], ranks[0].world_size
    if len(known) != size or known != list(range(size)):
        raise SpecError(
            f"the traces are from ranks {quoted(known)} of {quoted(size)}; give one trace of each rank"
        )
    return [_checked_nodes(each) for each in ranks]


def _read(path: Path, place: int, count: int) -> _Rank:
    try:
        found = parsed_json(unpacked(path))
        about = found.get("distributedInfo") or {}
        events = [row for row in found["traceEvents"] if row.get("ph") == "X" and row.get("dur") is not None]
        rank, world_size = int(about.get("rank", place)), int(about.get("world_size", count))
    except (
        ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, OverflowError, zlib.error
    ) as error:  # fmt: skip
        raise SpecError(
            f"{path} is not a Kineto trace ({type(error).__name__}: {error}); give what "
            "torch.profiler.profile.export_chrome_trace writes"
        ) from error
    for event in events:
        if (
            not isinstance(event.get("name"), str)
            or not _is_time(event.get("ts"))
            or not (_is_time(event["dur"]) and float(event["dur"]) >= 0)
        ):
            given = {key: event.get(key) for key in ("name", "ts", "dur")}
            raise SpecError(
                f"{path} has an event with {quoted(given)}; each complete event needs a name, and ts and dur in "
                "microseconds, as torch.profiler.profile.export_chrome_trace writes them"
            )
    return _Rank(path, rank, world_size, events)


def _is_time(value: Any) -> bool:
    try:
        return abs(float(value)) <= _MOST_US
    except (TypeError, ValueError, OverflowError):
        return False


def _checked_nodes(trace: _Rank) -> list[TraceNode]:
    try:
        return _nodes(trace)
    except SpecError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise SpecError(
            f"{trace.path} has a collective whose args cannot be read ({type(error).__name__}: {error}); give what "
            "torch.profiler.profile.export_chrome_trace writes"
        ) from error


def _nodes(trace: _Rank) -> list[TraceNode]:
    on_gpu = any(event.get("cat") == "kernel" for event in trace.events)
    calls = list(_nccl(trace) if on_gpu else _gloo(trace))
    busy = _kernels(trace) if on_gpu else _operations(trace)
    pieces = [ComputeSpan(_COMPUTING, start, end) for start, end in union(busy)]
    if not pieces:
        raise SpecError(f"{trace.path} has no computations; profile a whole training step")
    zero = min([pieces[0].start, *(call.start for call in calls)])
    return nodes_of(filled(pieces, calls), calls, zero=zero)


def _span(event: _Event) -> tuple[float, float]:
    start = float(event["ts"]) / _US
    return start, start + float(event["dur"]) / _US


# GPUs


def _is_nccl(event: _Event) -> bool:
    return str(event["name"]).lower().startswith("nccl")


def _kernels(trace: _Rank) -> Iterator[tuple[float, float]]:
    return (_span(event) for event in trace.events if event.get("cat") in _GPU and not _is_nccl(event))


def _nccl(trace: _Rank) -> Iterator[Call]:
    for event in trace.events:
        if event.get("cat") != "kernel" or not _is_nccl(event):
            continue
        about = event.get("args") or {}
        if "Collective name" not in about or "In msg nelems" not in about:
            raise SpecError(
                f"{trace.path}: the kernel {quoted(event['name'])} does not say which collective it is; profile with "
                "torch 2.3 or newer"
            )
        name = str(about["Collective name"])
        size = int(about["In msg nelems"]) * _element_bytes(str(about.get("dtype", "")), trace)
        group = str(about.get("Process Group Ranks") or about.get("Process Group Name") or "")
        peer = about.get("Dst Rank", about.get("Src Rank"))
        yield _call(name, event, size, trace, group=group, peer=None if peer is None else int(peer))


# CPUs


def _gloo(trace: _Rank) -> Iterator[Call]:
    ordered = sorted(trace.events, key=lambda event: float(event["ts"]))
    peers: dict[str, list[int]] = {"send": [], "recv": []}
    for event in ordered:
        name = str(event["name"])
        if name in ("c10d::send", "c10d::recv_"):
            given = (event.get("args") or {}).get("Concrete Inputs") or []
            if len(given) > 2 and given[2]:
                peers[name.removeprefix("c10d::").rstrip("_")].append(int(given[2]))
        if not name.startswith("gloo:"):
            continue
        op = name.removeprefix("gloo:")
        size = 0 if op == "barrier" else _input_bytes(event, trace)
        waiting = peers.get(op, [])
        yield _call(op, event, size, trace, peer=waiting.pop(0) if waiting else None)


def _input_bytes(event: _Event, trace: _Rank) -> int:
    about = event.get("args") or {}
    shapes, types = about.get("Input Dims"), about.get("Input type")
    if not shapes or not types:
        raise SpecError(
            f"{trace.path}: {quoted(event['name'])} has no shapes; profile with record_shapes=True"
        )
    return sum(
        _num_elements(shape) * _element_bytes(str(name), trace)
        for shape, name in zip(shapes, types, strict=True)
    )


def _num_elements(shape: Sequence[Any]) -> int:
    """Return the number of elements of a tensor, or of all tensors of a list."""
    tensors = shape if shape and isinstance(shape[0], list) else [shape]
    return sum(prod(each) for each in tensors)


def _operations(trace: _Rank) -> Iterator[tuple[float, float]]:
    """Yield the operations that compute: those outside of collectives, on threads that do not only communicate."""
    by_thread: dict[Any, list[_Event]] = {}
    for event in trace.events:
        by_thread.setdefault(event.get("tid"), []).append(event)
    for rows in by_thread.values():
        own = [event for event in rows if event.get("cat") == "cpu_op"]
        waits = [_span(event) for event in rows if str(event["name"]).startswith(("gloo:", "c10d::"))]
        works = [
            ComputeSpan(_COMPUTING, *_span(event))
            for event in own
            if not str(event["name"]).startswith("c10d::")
        ]
        for piece in without(works, waits):
            yield piece.start, piece.end


# Both


def _element_bytes(name: str, trace: _Rank) -> int:
    if name.lower() not in _SIZES:
        raise SpecError(
            f"{trace.path}: the size of dtype {quoted(name)} is not known; known are {', '.join(_SIZES)}"
        )
    return _SIZES[name.lower()]


def _plain(name: str) -> str:
    return name.lower().replace("_", "").removeprefix("nccl:")


def _call(
    name: str, event: _Event, size: int, trace: _Rank, *, group: str = "", peer: int | None = None
) -> Call:
    """Return a collective, or a message to or from a peer.

    Raises:
        SpecError: The collective is not supported, or the peer of a message is not in the trace.
    """
    start, end = _span(event)
    plain = _plain(name)
    if not 0 <= size <= _MOST_BYTES:
        raise SpecError(
            f"{trace.path}: {quoted(name)} has a size of {quoted(size)} bytes; profile the step again"
        )
    if plain in ("send", "recv"):
        if peer is None:
            raise SpecError(
                f"{trace.path}: {quoted(event['name'])} does not name the other rank; profile with record_shapes=True"
            )
        source, target = (trace.rank, peer) if plain == "send" else (peer, trace.rank)
        about = {"comm_size": size, "comm_src": source, "comm_dst": target, "comm_tag": 0}
        return Call(plain, SEND if plain == "send" else RECEIVE, start, end, about)
    number = next((number for known, number in _NUMBERS.items() if plain.startswith(known)), None)
    if number is None:
        raise SpecError(
            f"{trace.path}: the collective {quoted(name)} is not simulated; known are {', '.join(COLLECTIVES.values())}"
        )
    return Call(
        COLLECTIVES[number],
        COLLECTIVE,
        start,
        end,
        {"comm_size": size, "comm_type": number, "pg_name": group},
    )
