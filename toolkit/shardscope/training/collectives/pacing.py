"""Emulation of a slower link: messages are delayed until they would have arrived.

Each rank has one full-duplex link to a switch, with the same bandwidth in each direction. A message of n bytes takes n
/ bandwidth to leave its sender, and arrives one latency later at the earliest. It must also pass through the link of
its receiver, which transmits at most `bandwidth` bytes per second from all ranks together. The delay is applied to the
send: the backend receives the message only when its last byte would have arrived. So a receive completes at the right
time without any change on the receiving side.

    Outlet              models the sending side of a link: when each message leaves
    Switch              models the receiving side: when each message arrives
    Pacer               one per process: a schedule of actions, and one thread that runs them
    PacedTransport      replaces a backend's send and receive

Each time is computed from other scheduled times, not from when a thread woke up, so delays of the thread
do not accumulate. After any rank has exited, or this rank has closed its connections, messages are no longer delayed,
so that the backend can report the error.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardscope.spec import Link
from shardscope.training.collectives.outlet import Outlet
from shardscope.training.collectives.switch import Switch
from shardscope.training.transports.protocol import timed_out

_UNLIMITED = 1e15  # bytes per second
_POLL_S = 0.05  # interval in seconds at which a waiting rank checks whether another rank has exited


@dataclass(frozen=True)
class _Message:
    receiver: int
    duration: float
    release: Callable[[], None]


class Pacer:
    """Tracks the messages and collectives in flight on this rank's link, and releases messages on time.

    Args:
        link: The link to emulate.
        switch: The switch that connects this link to the other ranks.
        limits_rate: Whether messages are limited to the link's bandwidth; if False, only latency is added, for links
            whose rate the kernel limits.
    """

    def __init__(self, link: Link, switch: Switch, *, limits_rate: bool = True) -> None:
        self.link, self.switch = link, switch
        self.is_on = False
        """Whether messages sent now are delayed."""
        self._bandwidth = link.bandwidth if limits_rate else _UNLIMITED
        self._outlet: Outlet[_Message] = Outlet(self._bandwidth)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._busy_until = 0.0  # time at which the last backend collective ends
        self._stopped_delaying = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    @contextmanager
    def switched(self, is_on: bool) -> Iterator[None]:
        """Return a context manager within which messages are delayed if `is_on`, and otherwise are not."""
        before, self.is_on = self.is_on, is_on
        try:
            yield
        finally:
            self.is_on = before

    @property
    def is_idle(self) -> bool:
        """Whether no delayed message is waiting for its time."""
        return not self._due and self._outlet.next_end() is None

    @property
    def free_at(self) -> float:
        """Time at which this rank's link becomes free, in seconds of `time.monotonic`."""
        with self._changed:
            self._advance()
            return max(time.monotonic(), self._outlet.all_end(), self._busy_until)

    def send(self, num_bytes: int, receiver: int, release: Callable[[], None]) -> None:
        """Schedule a message of `num_bytes` to rank `receiver`; `release` is called at the time of its arrival."""
        with self._changed:
            message = _Message(receiver, num_bytes / self._bandwidth, release)
            self._outlet.add(message, receiver, num_bytes, self._advance())
            self._changed.notify()

    def collective(self, started: float, seconds: float) -> float:
        """Reserve the link for a backend collective, after all earlier ones; return the time at which it ends.

        Args:
            started: Time at which the last rank started the collective (of `time.monotonic`).
            seconds: Duration of the collective on the link.
        """
        with self._changed:
            self._busy_until = max(started, self._busy_until) + seconds
            return self._busy_until

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` on the pacer's thread at time `when` on the `time.monotonic` clock."""
        with self._changed:
            self._add(when, action)
            self._changed.notify()

    def release_all(self) -> None:
        """Release all delayed messages, and stop delaying new ones."""
        with self._changed:
            self._stopped_delaying = True
            self._changed.notify()

    def close(self) -> None:
        """Release all delayed messages, stop the thread and leave the switch."""
        with self._changed:
            if self._closed:
                return
            self._stopped_delaying = self._closed = True
            self._changed.notify()
        self._thread.join()
        self.switch.close()

    def _add(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), action))

    def _advance(self) -> float:
        """Advance the outlet to now, schedule the arrival of messages that have left, and return the current time."""
        now = time.monotonic()
        if self._stopped_delaying:
            for message in self._outlet.clear():
                self._add(now, message.release)
        for left in self._outlet.advance(now):
            message, latency = left.item, self.link.latency_s
            arrives = self.switch.receive(
                message.receiver, left.first + latency, left.last + latency, message.duration
            )
            self._add(arrives, message.release)
        return now

    def _run(self) -> None:
        while (action := self._next()) is not None:
            action()

    def _next(self) -> Callable[[], None] | None:
        """Wait until an action is due and return it; return None when the pacer is closed and no actions are left."""
        polled = time.monotonic()
        with self._changed:
            while True:
                now = self._advance()
                if self._due and (self._stopped_delaying or self._due[0][0] <= now):
                    return heapq.heappop(self._due)[2]
                wait = self._wait_s(now)
                if wait is None and self._closed:
                    return None
                if wait is not None and now - polled >= _POLL_S:
                    self._stopped_delaying, polled = self.switch.any_rank_exited(), now
                    continue
                self._changed.wait(wait)
                if wait is None:
                    polled = time.monotonic()

    def _wait_s(self, now: float) -> float | None:
        """Return the time in seconds after which to check for due actions; None if no action or message is waiting."""
        next_end = self._outlet.next_end()
        ends = [self._due[0][0]] if self._due else []
        ends += [next_end] if next_end is not None else []
        return min(*ends, now + _POLL_S) - now if ends else None


class PacedSend(dist.Work):
    """Handle of a delayed message, which completes for the sender when the message would have arrived."""

    def __init__(self, send: Callable[[], dist.Work]) -> None:
        super().__init__()
        self._send = send
        self._inner: dist.Work | None = None
        self._error: RuntimeError | None = None
        self._released = threading.Event()

    def release(self) -> None:
        """Pass the message to the backend."""
        try:
            self._inner = self._send()
        except RuntimeError as error:  # raised again in `wait`
            self._error = error
        self._released.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        started = time.monotonic()
        if not self._released.wait(None if timeout is None else timeout.total_seconds()):
            assert timeout is not None
            raise RuntimeError(
                f"{timed_out(timeout.total_seconds())} for a message to arrive over the emulated link"
            )
        if self._error is not None:
            raise self._error
        assert self._inner is not None
        if timeout is None:
            return self._inner.wait()
        rest = timeout - timedelta(seconds=time.monotonic() - started)
        return self._inner.wait(max(rest, timedelta(milliseconds=1)))

    def is_completed(self) -> bool:
        return self._released.is_set() and (self._inner is None or self._inner.is_completed())


class PacedTransport:
    """Delays sends as the emulated link would; receives are passed to the backend unchanged.

    Args:
        inner: The backend that carries the messages.
        pacer: This rank's pacer.
        rank_of: Function from a rank in the group to its rank in the whole run.
    """

    def __init__(self, inner: Any, pacer: Pacer, rank_of: Callable[[int], int]) -> None:
        self._inner, self._pacer, self._rank_of = inner, pacer, rank_of
        self.recv, self.recv_anysource = inner.recv, inner.recv_anysource
        self.recv_add = getattr(inner, "recv_add", None)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        """Send like `ProcessGroup.send`. Do not modify the tensors before the returned handle has completed."""
        pacer = self._pacer
        if not pacer.is_on and pacer.is_idle:
            work: dist.Work = self._inner.send(tensors, dst, tag)
            return work
        message = PacedSend(lambda: self._inner.send(tensors, dst, tag))
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        pacer.send(size if pacer.is_on else 0, self._rank_of(dst), message.release)
        return message
