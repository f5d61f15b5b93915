"""A step as a graph of operations, each with a time, bytes to send and dependencies, and the function that runs it in
the event loop.

Every operation belongs to a lane: the activity of one rank, or of several ranks that do the same at the same time.
`Graph.run` returns when each operation starts and ends, and which dependency it waited for last.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardscope.errors import SpecError
from shardscope.simulator import _loop

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
JOIN = ""
"""Kind of operations that take no time and only join or order other operations."""


def _ints() -> array[int]:
    return array("q")


def _floats() -> array[float]:
    return array("d")


def _flags() -> array[int]:
    return array("b")


@dataclass
class Graph:
    """Operations, added one by one or many at a time; `add` and `add_many` return the index of the first new operation.

    Numbers are in arrays of the standard library, which grow like lists and which NumPy reads without copying.

    Attributes:
        lanes: Names of the lanes.
        link_names: Names of the links.
        capacity: Bytes per second of each link.
        op_lane: Lane of each operation.
        kinds: Name of the term to which each operation's time belongs; `JOIN` for none.
        fixed: Fixed seconds of each operation.
        size: Bytes for which each operation occupies its links: bandwidth times occupied seconds; 0 for no message.
        payload: Bytes that each operation sends.
        links: Links of each operation, `width` entries per operation; -1 for none.
        width: Largest number of links of an operation, a power of 2.
        is_serial: Whether each operation occupies its lane, so that its time counts as the lane's own; the
            time of all other operations counts only while the lane waits for them. `run` follows only
            `edges`, so the caller must order the computations that occupy a lane.
        is_join: Whether the kind of each operation is `JOIN`.
        labels: Text of each operation, such as ``micro-batch 3``.
        peers: Lane that receives each operation's message; -1 for none.
        shifts: Position of the receiving rank in its lane, minus the position of the sending rank in its own lane.
        edges: Pairs of operations: the second starts after the first.
    """

    lanes: list[str]
    link_names: list[str] = field(default_factory=list)
    capacity: list[float] = field(default_factory=list)
    op_lane: array[int] = field(default_factory=_ints)
    kinds: list[str] = field(default_factory=list)
    fixed: array[float] = field(default_factory=_floats)
    size: array[float] = field(default_factory=_floats)
    payload: array[float] = field(default_factory=_floats)
    links: array[int] = field(default_factory=_ints)
    is_serial: array[int] = field(default_factory=_flags)
    is_join: array[int] = field(default_factory=_flags)
    labels: list[str] = field(default_factory=list)
    peers: array[int] = field(default_factory=_ints)
    shifts: array[int] = field(default_factory=_ints)
    edges: array[int] = field(default_factory=_ints)
    width: int = 2

    @property
    def num_ops(self) -> int:
        """Number of operations."""
        return len(self.fixed)

    def link(self, name: str, capacity: float) -> int:
        """Add a link with a capacity in bytes per second, and return its index.

        Raises:
            SpecError: The capacity is not a positive, finite number.
        """
        if not 0 < capacity < np.inf:
            raise SpecError(
                f"link {name!r} has bandwidth={capacity}; give a positive, finite number of bytes/s"
            )
        self.link_names.append(name)
        self.capacity.append(capacity)
        return len(self.capacity) - 1

    def add(
        self,
        lane: int,
        kind: str = JOIN,
        seconds: float = 0.0,
        *,
        size: float = 0.0,
        links: Sequence[int] = (),
        payload: float | None = None,
        after: Iterable[int] = (),
        serial: bool = True,
        label: str = "",
        peer: int = -1,
        shift: int = 0,
    ) -> int:
        """Add an operation and return its index.

        Args:
            lane: Lane to which the operation belongs.
            kind: Term to which the time of the operation belongs.
            seconds: Fixed time, or latency of a message.
            size: Bytes for which the operation occupies its links.
            links: Links that the operation occupies, at most `width`.
            payload: Bytes that are sent, if they differ from `size`.
            after: Operations that must end first; -1 is ignored.
            serial: Whether the operation occupies its lane; see `is_serial`.
            label: Text for the timeline.
            peer: Lane that receives the message; -1 for none.
            shift: Position of the receiving rank in its lane, relative to the sender's; see `shifts`.
        """
        op = len(self.fixed)
        self.op_lane.append(lane)
        self.kinds.append(kind)
        self.fixed.append(seconds)
        self.size.append(size if links else 0.0)
        self.payload.append((size if payload is None else payload) if links else 0.0)
        self.links.extend((*links, *([-1] * (self.width - len(links)))))
        self.is_serial.append(serial)
        self.is_join.append(kind == JOIN)
        self.labels.append(label)
        self.peers.append(peer)
        self.shifts.append(shift)
        for other in after:
            if other >= 0:
                self.edges.extend((other, op))
        return op

    def add_many(
        self,
        lanes: Ints,
        kind: str | Sequence[str],
        seconds: Floats,
        *,
        size: Floats,
        links: Ints,
        peers: Ints,
        serial: bool = True,
        labels: Sequence[str] = (),
    ) -> int:
        """Add a message for each entry of the arrays and return the index of the first; see `add` for the arguments.

        Args:
            lanes: Lanes; shape `(n,)`, as all arrays but `links`.
            kind: Term to which the time of the messages belongs, or one term per message.
            seconds: Latencies.
            size: Bytes.
            links: Links; shape `(n, width)`.
            peers: Lanes that receive the messages.
            serial: Whether the messages occupy their lanes.
            labels: Texts for the timeline; none if empty.
        """
        first, count = len(self.fixed), len(lanes)
        for column, values, kind_of in (
            (self.op_lane, lanes, np.int64), (self.fixed, seconds, np.float64), (self.size, size, np.float64),
            (self.payload, size, np.float64), (self.links, links, np.int64), (self.peers, peers, np.int64),
        ):  # fmt: skip
            column.frombytes(np.ascontiguousarray(values, kind_of).tobytes())
        self.kinds += [kind] * count if isinstance(kind, str) else kind
        self.is_serial.frombytes(bytes([serial]) * count)
        self.is_join.frombytes(bytes(count))
        self.shifts.frombytes(bytes(count * self.shifts.itemsize))
        self.labels += labels or [""] * count
        return first

    def order(self, before: int, after: int) -> None:
        """Let an operation start after another has ended."""
        self.edges.extend((before, after))

    def order_many(self, before: Ints, after: Ints) -> None:
        """Let each operation of `after` start after the operation in `before` has ended; -1 in `before` is ignored."""
        there = before >= 0
        self.edges.frombytes(np.stack([before[there], after[there]], axis=1).astype(np.int64).tobytes())

    def run(self) -> Times:
        """Run all operations and return their times.

        Raises:
            SpecError: Some operations wait for each other, so that none of them can start.
        """
        edges = np.asarray(self.edges, np.int64).reshape(-1, 2)
        return run(
            np.asarray(self.fixed, float), np.asarray(self.size, float), np.asarray(self.links, np.int64),
            np.asarray(self.capacity, float), edges,
        )  # fmt: skip

    @property
    def first_links(self) -> Ints:
        """The first link of each operation; -1 for none."""
        return np.asarray(self.links, np.int64)[:: self.width]


@dataclass(frozen=True)
class Times:
    """Times of all operations, in seconds.

    Attributes:
        start: Start of each operation.
        end: End of each operation.
        cause: The dependency that ended last, and so determined the start; -1 for none.
        num_events: Number of events that the loop processed.
    """

    start: Floats
    end: Floats
    cause: Ints
    num_events: int

    @property
    def total(self) -> float:
        """End of the last operation, in seconds."""
        return float(self.end.max()) if len(self.end) else 0.0


def run(fixed: Floats, size: Floats, links: Ints, capacity: Floats, edges: Ints) -> Times:
    """Run the operations of a graph given as arrays; see `Graph` for their meaning.

    Args:
        fixed: Fixed seconds; shape `(n,)`.
        size: Bytes to send; shape `(n,)`.
        links: Links; shape `(width * n,)`, with a width that is a power of 2.
        capacity: Bytes per second of each link.
        edges: Dependencies; shape `(m, 2)`.

    Raises:
        SpecError: Some operations wait for each other.
    """
    count, num_links = len(fixed), max(1, len(capacity))
    order = np.argsort(edges[:, 0], kind="stable")
    first = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(edges[:, 0], minlength=count), out=first[1:])
    missing = np.bincount(edges[:, 1], minlength=count).astype(np.int64)
    start, end, cause = np.full(count, -1.0), np.full(count, -1.0), np.full(count, -1, np.int64)
    given = [fixed, size, links, capacity, first, edges[order, 1], missing, start, end, cause]
    width = len(links) // count if count else 1
    columns = given + _work_space(count, width, num_links)
    events, columns = run_loop(form(count), columns)
    start, end, cause = (np.asarray(column) for column in columns[7:10])
    if count and end.min() < 0:
        raise SpecError(f"{int((end < 0).sum())} operations wait for each other; order them without a cycle")
    return Times(start, end, cause, events)


def _work_space(count: int, width: int, num_links: int) -> list[npt.NDArray[Any]]:
    """Return the workspace of the event loop, in the order of its arguments."""

    def whole(length: int, value: int = 0) -> Ints:
        return np.full(length, value, np.int64)

    ops = [whole(count), np.empty(count), whole(count), whole(count, -1)]
    ops += [np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count)]
    ops += [whole(count), whole(count), whole(count), whole(width * count, -1), whole(width * count, -1)]
    of_links = [whole(num_links, -1), whole(num_links), np.zeros(num_links), whole(num_links)]
    of_links += [whole(num_links), whole(num_links), whole(num_links), whole(num_links)]
    return [*ops, *of_links, whole(1, width.bit_length() - 1)]


VARIABLE = "SHARDSCOPE_SIMULATOR"
"""Environment variable that selects the form of the event loop for all graphs: ``numba`` or ``python``."""
FORMS = ("numba", "python")
FEWEST = 30_000
"""Minimum number of operations for which loading the compiled loop pays off."""


def form(num_ops: int) -> str:
    """Return the form of the event loop for a graph: ``numba`` or ``python``.

    Raises:
        SpecError: ``SHARDSCOPE_SIMULATOR`` has an unknown value, or is ``numba`` although numba is not installed.
    """
    installed = importlib.util.find_spec("numba") is not None
    asked = os.environ.get(VARIABLE)
    if not asked:
        is_loaded = _compiled_loop.cache_info().currsize > 0
        return "numba" if installed and (is_loaded or num_ops >= FEWEST) else "python"
    if asked not in FORMS:
        raise SpecError(f"{VARIABLE}={asked!r} is not valid; use {' or '.join(FORMS)}, or leave it out")
    if asked == "numba" and not installed:
        raise SpecError(
            f"{VARIABLE}='numba', but numba is not installed; run pip install numba, or set {VARIABLE}=python"
        )
    return asked


def run_loop(chosen: str, columns: list[Any]) -> tuple[int, list[Any]]:
    """Run the event loop over columns, which it changes; return the number of events, and the changed columns."""
    if chosen == "numba":
        return int(_compiled_loop()(*columns)), columns
    lists = [column.tolist() for column in columns]
    return int(_loop.run_loop(*lists)), lists


@cache
def _compiled_loop() -> Callable[..., Any]:
    """Load the event loop's module a second time, as a copy whose functions numba compiles."""
    name = f"{_loop.__name__}_compiled"
    spec = importlib.util.spec_from_file_location(name, _loop.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    loop: Callable[..., Any] = module.run_loop
    return loop
