"""The meter of one rank: counts every byte it sends and receives, and records spans of computation and communication.

There is one meter per rank. The metered process group adds traffic and spans to it, the trainer sets the meter's
current step, and what the meter recorded during a step goes into that step's event. Collectives may finish on the
backend's own threads, so a lock protects all additions.

Bytes are attributed to the step in which they are sent. That is this rank's current step, except on a parameter server:
it serves workers that may be at a different step, and attributes the traffic to the worker's step. Traffic for
start-up, evaluation and checkpoints is attributed to `OBSERVING` instead of a step.
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
"""Traffic by collective, as stored in events."""


@dataclass
class Traffic:
    """Traffic of one type of collective on this rank.

    Where Shardscope sends the messages itself, `sent_bytes` is counted message by message. Where the backend sends
    them, it is an equal share of the total that the backend's algorithm sends over all ranks, so that the sum over
    ranks is exact.
    """

    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    calls: int = 0
    sent_to: dict[int, int] = field(default_factory=dict)
    """Bytes sent to each peer; empty where the backend sends the messages, because it does not report them."""

    def count_sent(self, peer: int, num_bytes: int) -> None:
        """Count one message to `peer`."""
        self.sent_bytes += num_bytes
        self.messages += 1
        self.sent_to[peer] = self.sent_to.get(peer, 0) + num_bytes

    def add(self, other: Traffic) -> None:
        """Add the counts of another `Traffic` to this one."""
        self.payload_bytes += other.payload_bytes
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.messages += other.messages
        self.calls += other.calls
        for peer, num_bytes in other.sent_to.items():
            self.sent_to[peer] = self.sent_to.get(peer, 0) + num_bytes


@dataclass(frozen=True)
class Span:
    """A time interval on one rank: `start` and `end` in Unix seconds, payload of `num_bytes`."""

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
        """Return the span with its times in seconds since `zero`."""
        return replace(self, start=self.start - zero, end=self.end - zero)

    def as_row(self) -> list[Any]:
        """Return the row stored in events; `Span(*row)` restores the span. Times are rounded to microseconds."""
        return [self.lane, self.name, round(self.start, 6), round(self.end, 6), self.num_bytes]


@dataclass
class Meter:
    """Counts traffic by step and collective, and records spans, until `drain` returns and clears them.

    Attributes:
        step: The current step; components that write their own events read it too.
        handed_over: Time at which the last collective was passed to the thread or backend that runs it, in Unix
            seconds.
    """

    step: int = 0
    handed_over: float = 0.0
    _booked: dict[int, dict[str, Traffic]] = field(default_factory=dict)
    _is_observing: bool = False
    _spans: list[Span] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, traffic: Traffic, *, step: int | None = None) -> None:
        """Add this rank's traffic from one call of the collective `name`; if `step` is None, to the current step."""
        with self._lock:
            booked = self._booked.setdefault(self._under_way if step is None else step, {})
            booked.setdefault(name, Traffic()).add(traffic)

    @property
    def _under_way(self) -> int:
        return OBSERVING if self._is_observing else self.step

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Context for evaluations and checkpoints: traffic within it is attributed to `OBSERVING`, not to a step."""
        before, self._is_observing = self._is_observing, True
        try:
            yield
        finally:
            self._is_observing = before

    @contextmanager
    def collective(self, name: str, payload: int) -> Iterator[Traffic]:
        """Record a call of one of Shardscope's own collectives; the caller counts messages on the yielded traffic."""
        traffic = Traffic(payload_bytes=payload, calls=1)
        try:
            with self.span("communication", name, payload):
                yield traffic
        finally:
            self.count(name, traffic)

    @contextmanager
    def backward_span(self) -> Iterator[None]:
        """Record the compute span of a backward pass: it ends when the last gradients are handed over, if any are."""
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
        """Record the time spent in this context as one span."""
        start = clock.now()
        try:
            yield
        finally:
            self.add_span(Span(lane, name, start, clock.now(), num_bytes))

    def add_span(self, span: Span) -> None:
        """Record a span that has already ended."""
        with self._lock:
            self._spans.append(span)

    def drain(self) -> tuple[Rows, list[list[Any]]]:
        """Return and clear the traffic of the current step (within `observing`: of `OBSERVING`) and all spans."""
        with self._lock:
            traffic = self._booked.pop(self._under_way, {})
            spans, self._spans = self._spans, []
        return _rows(traffic), [span.as_row() for span in spans]

    def drain_late(self, up_to: float = math.inf) -> dict[int, Rows]:
        """Return and clear the traffic still recorded for steps, by step number: it arrived after the step was drained.

        Args:
            up_to: The last step to return. Later steps are kept, because this rank may serve workers that are ahead of
                it.
        """
        with self._lock:
            steps = sorted(step for step in self._booked if OBSERVING < step <= up_to)
            return {step: _rows(self._booked.pop(step)) for step in steps}


def _rows(traffic: dict[str, Traffic]) -> Rows:
    return {name: asdict(row) for name, row in traffic.items()}
