"""Nodes of a Chakra trace from the timeline of one rank: its computations, and the calls in which it communicates.

A timeline has no dependencies, so they are inferred from time: an activity depends on the computation before it, and on
all calls that had ended when it started. Computation is cut wherever a call starts or ends. Time in which a rank
neither computes nor waits for a call counts as computation, because the rank's own program uses it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from shardscope.runlog.chakra import COLLECTIVE, COMPUTE, RECEIVE, SEND, TraceNode

HOST = "host"
"""Name of nodes for time in which the rank neither computes nor waits for a call."""
_US = 1e6
_EPS = 1e-9


class ComputeSpan(NamedTuple):
    """A computation, between two times in seconds."""

    name: str
    start: float
    end: float


class Call(NamedTuple):
    """A message or a collective, between two times in seconds; a received message arrives at its `end`."""

    name: str
    type: int
    """`COLLECTIVE`, `SEND` or `RECEIVE`."""
    start: float
    end: float
    about: Mapping[str, Any]
    """Attributes of the node, such as ``comm_size``."""


def without(pieces: Iterable[ComputeSpan], calls: Iterable[tuple[float, float]]) -> list[ComputeSpan]:
    """Return the parts of the computations that lie outside these intervals."""
    cuts, found = sorted(calls), []
    ended = [*accumulate((end for _, end in cuts), max)]  # by when each cut and all before it have ended
    for piece in pieces:
        at = piece.start
        for place in range(bisect_right(ended, at), len(cuts)):
            start, end = cuts[place]
            if max(start, at) >= piece.end:
                break
            if end > at:
                if start > at:
                    found.append(ComputeSpan(piece.name, at, start))
                at = max(at, end)
        if at < piece.end:
            found.append(ComputeSpan(piece.name, at, piece.end))
    return found


def filled(pieces: Iterable[ComputeSpan], calls: Sequence[Call]) -> list[ComputeSpan]:
    """Return the computations, with a `HOST` computation for each part of a gap in which no call is in progress."""
    ordered = sorted(pieces, key=lambda piece: piece.start)
    gaps, at = [], ordered[0].start if ordered else 0.0
    for piece in ordered:
        if piece.start > at + _EPS:
            gaps.append(ComputeSpan(HOST, at, piece.start))
        at = max(at, piece.end)
    return sorted(
        [*ordered, *without(gaps, [(call.start, call.end) for call in calls])], key=lambda p: p.start
    )


def nodes_of(pieces: Iterable[ComputeSpan], calls: Iterable[Call], *, zero: float = 0.0) -> list[TraceNode]:
    """Return the nodes of one rank, in the order of their start.

    Args:
        pieces: Computations that do not overlap each other.
        calls: Messages and collectives.
        zero: Time at which the trace starts, in seconds.
    """
    made, known = _Nodes(zero), sorted(calls, key=lambda call: (_begin(call), call.end))
    edges = sorted({edge for call in known for edge in (call.start, call.end)})
    work = [part for piece in sorted(pieces, key=lambda p: p.start) for part in _cut(piece, edges)]
    todo: list[tuple[float, int, ComputeSpan | Call]] = [(piece.start, 1, piece) for piece in work]
    todo += [(_begin(call), 0, call) for call in known]
    for _, _, each in sorted(todo, key=lambda row: row[:2]):
        made.add(each)
    return made.nodes


def _begin(call: Call) -> float:
    return call.end if call.type == RECEIVE else call.start


def _cut(piece: ComputeSpan, edges: Sequence[float]) -> list[ComputeSpan]:
    inside = edges[bisect_right(edges, piece.start + _EPS) : bisect_left(edges, piece.end - _EPS)]
    return [ComputeSpan(piece.name, a, b) for a, b in pairwise([piece.start, *inside, piece.end])]


@dataclass
class _Nodes:
    """Adds the activities of one rank, and finds the dependencies of each."""

    zero: float
    nodes: list[TraceNode] = field(default_factory=list)
    _last: tuple[float, int] | None = None
    """End and id of the last computation."""
    _open: list[tuple[float, int]] = field(default_factory=list)
    """Ends and ids of the calls on which no computation depends yet."""

    def add(self, each: ComputeSpan | Call) -> None:
        number = len(self.nodes) + 1
        start = _begin(each) if isinstance(each, Call) else each.start
        after = [id_ for end, id_ in self._open if end <= start + _EPS]
        if self._last is not None:
            after.insert(0, self._last[1])
        clock = {"start_us": round((start - self.zero) * _US)}
        if isinstance(each, ComputeSpan):
            self._open = [row for row in self._open if row[0] > start + _EPS]
            self._last = (each.end, number)
            # Durations are rounded where they end, so that their sum does not drift.
            end_us = round((each.end - self.zero) * _US)
            node = TraceNode(
                number, each.name, COMPUTE, tuple(after), **clock, duration_us=max(0, end_us - clock["start_us"]),
                attributes={"is_cpu_op": False},
            )  # fmt: skip
        else:
            self._open.append((each.end, number))
            before = () if each.type == RECEIVE else tuple(after)
            node = TraceNode(
                number, each.name, each.type, before, **clock, duration_us=round((each.end - each.start) * _US),
                attributes={"is_cpu_op": False, **each.about},
            )  # fmt: skip
        self.nodes.append(node)


__all__ = ["COLLECTIVE", "HOST", "RECEIVE", "SEND", "Call", "ComputeSpan", "filled", "nodes_of", "without"]
