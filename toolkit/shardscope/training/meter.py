"""The meter of one rank: every byte that it sends and receives, and its spans of computation and communication.

There is one meter per rank. The metered process group feeds it, the trainer opens and closes steps on it, and its
records of a step go into that step's event. Collectives may finish on the backend's own threads, so adding is locked.

Bytes are booked to the step that sends them. That is the current step, except for a parameter server, which answers
workers that are at other steps than its own rank: it names the worker's step. Traffic of starting, evaluating and
saving is booked to `OBSERVING` instead of a step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardscope.training import clock

OBSERVING = 0
"""Step number for traffic that belongs to no step; steps count from 1."""

Rows = dict[str, dict[str, int]]
"""Traffic by collective, in the form that events carry."""


@dataclass
class Traffic:
    """Traffic of one kind of collective on this rank.

    `sent_bytes` is counted message by message where Shardscope sends the messages itself. Where the backend does, it
    is this rank's even share of the total that the backend's algorithm sends, so that the sum over ranks is exact.
    """

    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    calls: int = 0
    sent_to: dict[int, int] = field(default_factory=dict)
    """Bytes sent to each peer; empty where the backend sends, as it does not report them."""

    def count_sent(self, peer: int, num_bytes: int) -> None:
        """Add one message to `peer`."""
        self.sent_bytes += num_bytes
        self.messages += 1
        self.sent_to[peer] = self.sent_to.get(peer, 0) + num_bytes

    def add(self, other: Traffic) -> None:
        """Add the counts of another row."""
        self.payload_bytes += other.payload_bytes
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.messages += other.messages
        self.calls += other.calls
        for peer, num_bytes in other.sent_to.items():
            self.sent_to[peer] = self.sent_to.get(peer, 0) + num_bytes


@dataclass(frozen=True)
class Span:
    """One interval of time on one rank: `start` and `end` in Unix seconds, `num_bytes` of payload."""

    lane: str
    name: str
    start: float
    end: float
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Length of the span, in seconds."""
        return self.end - self.start

    def since(self, zero: float) -> Span:
        """The span with times in seconds since `zero`."""
        return replace(self, start=self.start - zero, end=self.end - zero)

    def as_row(self) -> list[Any]:
        """The row that events contain and that `Span(*row)` reads; times are rounded to the clock's precision."""
        return [self.lane, self.name, round(self.start, 6), round(self.end, 6), self.num_bytes]


@dataclass
class Meter:
    """Counts traffic by step and collective, and records spans, from one `drain` to the next.

    Attributes:
        step: The current step, also for components that write their own events.
        handed_over: When the last collective was passed to the thread or backend that runs it, in Unix seconds.
    """

    step: int = 0
    handed_over: float = 0.0
    _booked: dict[int, dict[str, Traffic]] = field(default_factory=dict)
    _is_observing: bool = False
    _spans: list[Span] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, traffic: Traffic, *, step: int | None = None) -> None:
        """Add this rank's traffic of one call of the collective `name`; a `step` of None is the current step."""
        with self._lock:
            booked = self._booked.setdefault(self._under_way if step is None else step, {})
            booked.setdefault(name, Traffic()).add(traffic)

    @property
    def _under_way(self) -> int:
        return OBSERVING if self._is_observing else self.step

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Context in which this rank evaluates or saves, so that its traffic is booked to no step."""
        before, self._is_observing = self._is_observing, True
        try:
            yield
        finally:
            self._is_observing = before

    @contextmanager
    def collective(self, name: str, payload: int) -> Iterator[Traffic]:
        """Meter one call of our own collective as one span; the caller counts its messages on the yielded traffic."""
        traffic = Traffic(payload_bytes=payload, calls=1)
        try:
            with self.span("communication", name, payload):
                yield traffic
        finally:
            self.count(name, traffic)

    @contextmanager
    def backward_span(self) -> Iterator[None]:
        """Record the span of a backward pass, which computes until it passes on its last gradients, and then waits."""
        start = clock.now()
        try:
            yield
        finally:
            end = clock.now()
            self.add_span(
                Span("compute", "backward", start, self.handed_over if start < self.handed_over else end)
            )

    @contextmanager
    def span(self, lane: str, name: str, num_bytes: int = 0) -> Iterator[None]:
        """Record the time spent inside as one span."""
        start = clock.now()
        try:
            yield
        finally:
            self.add_span(Span(lane, name, start, clock.now(), num_bytes))

    def add_span(self, span: Span) -> None:
        """Record a span that is already over."""
        with self._lock:
            self._spans.append(span)

    def drain(self) -> tuple[Rows, list[list[Any]]]:
        """Traffic of the current step (of `OBSERVING` within `observing`) and all spans, since the last call."""
        with self._lock:
            traffic = self._booked.pop(self._under_way, {})
            spans, self._spans = self._spans, []
        return _rows(traffic), [span.as_row() for span in spans]

    def drain_late(self, up_to: float = math.inf) -> dict[int, Rows]:
        """Traffic of steps that this rank has reported already, by step, since the last call.

        Args:
            up_to: The last step to return; this rank may serve workers that are ahead of it.
        """
        with self._lock:
            steps = sorted(step for step in self._booked if OBSERVING < step <= up_to)
            return {step: _rows(self._booked.pop(step)) for step in steps}


def _rows(traffic: dict[str, Traffic]) -> Rows:
    return {name: asdict(row) for name, row in traffic.items()}
