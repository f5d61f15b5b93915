"""Meter of one rank: records the bytes that it sends and receives, and time spans of computation and communication.

There is one meter per rank. The metered process group adds traffic and spans to it. The trainer sets the meter's
current step, and writes what the meter recorded during a step to that step's event. Collectives may finish on the
backend's threads, so a lock protects the records.

Bytes are assigned to the rank's current step, except on a parameter server, which assigns them to the step of the
worker that it serves; the two steps may differ. Traffic for start-up, evaluation and checkpoints is assigned to
`OBSERVING` instead of a step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from shardscope.training import clock
from shardscope.training.compute_pace import ComputePace, PassSpan

if TYPE_CHECKING:
    from torch.optim import Optimizer

OBSERVING = 0
"""Step number for traffic that belongs to no step; steps count from 1."""

Rows = dict[str, dict[str, int]]
"""Traffic by collective, as stored in events."""


@dataclass
class Traffic:
    """Traffic of one type of collective on this rank.

    For Shardscope's own collectives, `sent_bytes` is the sum over messages. For backend collectives, it is an
    equal share of the total that the backend's algorithm sends over all ranks, so that the sum over ranks is exact.
    """

    payload_bytes: int = 0
    """Total size of the tensors passed to the collective."""
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    calls: int = 0
    sent_to: dict[int, int] = field(default_factory=dict)
    """Bytes sent to each rank; empty for backend collectives, because the backend does not report its messages."""

    def count_sent(self, peer: int, num_bytes: int, label: Label | None = None) -> None:  # noqa: ARG002
        """Add one message of `num_bytes` to the rank `peer`; `label` describes it, if messages are logged."""
        self.sent_bytes += num_bytes
        self.messages += 1
        self.sent_to[peer] = self.sent_to.get(peer, 0) + num_bytes

    def arrived(self, peer: int, num_bytes: int) -> None:
        """Record that a message from the rank `peer` has arrived; a no-op unless messages are logged."""

    def add(self, other: Traffic) -> None:
        """Add the counts of another `Traffic` to this one."""
        self.payload_bytes += other.payload_bytes
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.messages += other.messages
        self.calls += other.calls
        for peer, num_bytes in other.sent_to.items():
            self.sent_to[peer] = self.sent_to.get(peer, 0) + num_bytes


_COUNTS = [count.name for count in fields(Traffic) if count.name != "sent_to"]
Label = Callable[[], tuple[str, str]]
"""Function that returns what a message carries and the part of the collective, such as ``chunk 1`` and ``round 2``."""


@dataclass
class LoggedTraffic(Traffic):
    """Traffic of one call whose messages are also logged one by one."""

    log: Callable[..., None] = field(default=lambda *_: None, repr=False)

    def count_sent(self, peer: int, num_bytes: int, label: Label | None = None) -> None:
        super().count_sent(peer, num_bytes, label)
        self.log("sent", peer, num_bytes, ("", "") if label is None else label())

    def arrived(self, peer: int, num_bytes: int) -> None:
        self.log("arrived", peer, num_bytes)


@dataclass(frozen=True)
class Span:
    """A time interval on one rank.

    Attributes:
        lane: Lane of the timeline, such as ``compute``, ``communication`` or ``codec``.
        name: Name of the activity, such as ``forward``.
        start: Start in Unix seconds.
        end: End in Unix seconds.
        num_bytes: Size of the payload; 0 for computation.
    """

    lane: str
    name: str
    start: float
    end: float
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Length of the span, in seconds."""
        return self.end - self.start

    def as_row(self) -> list[Any]:
        """Return the span as a list for events, with times rounded to microseconds; ``Span(*row)`` restores it."""
        return [self.lane, self.name, round(self.start, 6), round(self.end, 6), self.num_bytes]


@dataclass
class Meter:
    """Records traffic by step and collective, and time spans; `drain` returns and clears the records.

    Attributes:
        step: The current step; also read by components that write their own events.
        logged_step: The step whose messages are logged one by one; `OBSERVING` for none.
        handed_over: Time in Unix seconds at which the last collective was passed to the thread or backend that runs it.
        pace: Makes computation take as long as on an emulated processor; None if no processor is emulated.
    """

    step: int = 0
    logged_step: int = OBSERVING
    handed_over: float = 0.0
    pace: ComputePace | None = None
    _traffic_by_step: dict[int, dict[str, Traffic]] = field(default_factory=dict)
    _is_observing: bool = False
    _pass: str = ""
    _waited_s: dict[str, float] = field(default_factory=dict)
    _spans: list[Span] = field(default_factory=list)
    _messages: list[list[Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def log(
        self, name: str, way: str, peer: int, num_bytes: int, label: tuple[str, str] = ("", ""), *,
        step: int | None = None,
    ) -> None:  # fmt: skip
        """Log a message that this rank has just ``sent`` or that has ``arrived``, if it belongs to `logged_step`.

        Args:
            name: Name of the collective.
            way: ``sent`` or ``arrived``.
            peer: The other rank.
            num_bytes: Size of the message.
            label: What the message carries, such as ``chunk 1``, and the part of the collective.
            step: Step that the message belongs to; None for the current step.
        """
        if self.logged_step and (self._current_step if step is None else step) == self.logged_step:
            row = [name, way, peer, num_bytes, round(clock.now(), 6), *label]
            with self._lock:
                self._messages.append(row)

    def arrived(self, name: str, peer: int, num_bytes: int) -> None:
        """Record that a message has just arrived; see `log`."""
        if self.pace is not None:
            self.pace.arrived_at = clock.now()
        self.log(name, "arrived", peer, num_bytes)

    def drain_messages(self) -> list[list[Any]]:
        """Return and clear the logged messages: name, way, peer, bytes, Unix time, item and phase of each."""
        with self._lock:
            messages, self._messages = self._messages, []
        return messages

    def count(self, name: str, traffic: Traffic, *, step: int | None = None) -> None:
        """Add this rank's traffic in one call of the collective `name` to `step` (None for the current step)."""
        with self._lock:
            traffic_of_step = self._traffic_by_step.setdefault(
                self._current_step if step is None else step, {}
            )
            traffic_of_step.setdefault(name, Traffic()).add(traffic)

    @property
    def _current_step(self) -> int:
        return OBSERVING if self._is_observing else self.step

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Return a context manager within which traffic is assigned to `OBSERVING`, for evaluations and checkpoints."""
        before, self._is_observing = self._is_observing, True
        try:
            yield
        finally:
            self._is_observing = before

    @contextmanager
    def collective(self, name: str, payload: int) -> Iterator[Traffic]:
        """Return a context manager that records a call of one of Shardscope's own collectives.

        It yields a `Traffic`, to which the caller adds each message.
        """
        traffic = Traffic(payload_bytes=payload, calls=1)
        if self.logged_step and self._current_step == self.logged_step:
            traffic = LoggedTraffic(payload_bytes=payload, calls=1, log=partial(self.log, name))
        try:
            with self.span("communication", name, payload):
                yield traffic
        finally:
            self.count(name, traffic)

    @contextmanager
    def forward_span(self) -> Iterator[None]:
        """Return a context manager that records the span of a forward pass of the model."""
        paced, self._pass = nullcontext() if self.pace is None else self.pace.forward(0), "forward"
        try:
            with self.span("compute", "forward"), paced:
                yield
        finally:
            self._pass = ""

    @contextmanager
    def backward_span(self) -> Iterator[None]:
        """Return a context manager that records the span of a backward pass of the model.

        If gradients are exchanged in it, the span ends when the last of them is passed to its collective, or when the
        pass ends on an emulated processor.
        """
        start, pace, self._pass = clock.now(), self.pace, "backward"

        def ended() -> float:
            return self.handed_over if start < self.handed_over else math.inf

        try:
            with nullcontext() if pace is None else pace.exchanging_backward(ended):
                yield
        finally:
            self._pass = ""
            emulated = None if pace is None else pace.backward_end
            self.add_span(
                Span(
                    "compute", "backward", start, min(ended() if emulated is None else emulated, clock.now())
                )
            )

    @contextmanager
    def stage_span(self, name: str, stage: int, passes: float) -> Iterator[PassSpan]:
        """Return a context manager that records the span of a pass of a pipeline stage, and yields its times.

        Args:
            name: ``forward`` or ``backward``.
            stage: The stage.
            passes: FLOPs of the pass, relative to the stage's forward pass.
        """
        times = PassSpan(clock.now())
        paced = nullcontext() if self.pace is None else self.pace.queued(stage, passes, times)
        try:
            with paced:
                yield times
        finally:
            times.end = times.end or clock.now()
            self.add_span(Span("compute", name, times.start, times.end))

    @contextmanager
    def update_span(self, optimizer: Optimizer, name: str = "optimizer") -> Iterator[None]:
        """Return a context manager that records the span of an update of the optimizer's parameters."""
        paced: AbstractContextManager[None] = nullcontext()
        if self.pace is not None:
            paced = self.pace.update(
                sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            )
        with self.span("compute", name), paced:
            yield

    def hold_gradients(self) -> None:
        """Wait until the gradients of the current backward pass are ready on the emulated processor, if there is one.

        Called before they are exchanged, on any thread that does not delay the rest of the pass.
        """
        if self.pace is not None:
            self.pace.hold_gradients()

    @contextmanager
    def waiting(self, *, is_within_layer: bool = False) -> Iterator[None]:
        """Return a context manager around a wait for other ranks within a pass, which is not computation.

        Args:
            is_within_layer: Whether the pass needs the result to go on, so that its gradients are ready later.
        """
        start = clock.now()
        try:
            with nullcontext() if self.pace is None else self.pace.waiting(is_within_layer=is_within_layer):
                yield
        finally:
            self._waited_s[self._pass] = self._waited_s.get(self._pass, 0.0) + clock.now() - start

    def drain_waits(self) -> dict[str, float]:
        """Return and clear the time, in seconds, that this rank waited for other ranks within passes, by pass name."""
        waited, self._waited_s = self._waited_s, {}
        return {name: round(seconds, 6) for name, seconds in waited.items() if name}

    @contextmanager
    def span(self, lane: str, name: str, num_bytes: int = 0) -> Iterator[None]:
        """Return a context manager that records the time spent in it as one span."""
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
        """Return and clear all spans and the traffic of the current step (within `observing`, that of `OBSERVING`)."""
        with self._lock:
            traffic = self._traffic_by_step.pop(self._current_step, {})
            spans, self._spans = self._spans, []
        return _rows(traffic), [span.as_row() for span in spans]

    def drain_late(self, up_to: float = math.inf) -> dict[int, Rows]:
        """Return and clear, by step, the traffic that was recorded for a step after the `drain` of that step.

        Args:
            up_to: The last step to return. Traffic of later steps is kept, because this rank may serve workers that are
                ahead of it.
        """
        with self._lock:
            steps = sorted(step for step in self._traffic_by_step if OBSERVING < step <= up_to)
            return {step: _rows(self._traffic_by_step.pop(step)) for step in steps}


def _rows(traffic: dict[str, Traffic]) -> Rows:
    return {name: _row(row) for name, row in traffic.items()}


def _row(traffic: Traffic) -> dict[str, Any]:
    counts: dict[str, Any] = {key: getattr(traffic, key) for key in _COUNTS}
    counts["sent_to"] = dict(traffic.sent_to)
    return counts
