"""Holding messages back until they would have come through a slower link.

Each rank has one link into a switch and sends and receives over it at the same time, at most `bandwidth` each way. A
message of n bytes takes n / bandwidth to leave its sender, arrives `latency` later, and by then must also have come
through its receiver's link, which takes in no more than `bandwidth` from all ranks together. What is held back is the
sending itself: the backend gets the message at the moment when its last byte would have arrived. So a receive is over
when its message is there, whenever somebody waits for it, and receivers need to know nothing.

    Outlet              the sending side of a link, Switch its receiving side: when a message leaves and arrives
    Pacer               one a process: what is due when, and one thread that does it
    PacedTransport      in the place of a backend's own send and receive

Times are planned ahead from one another, not from when a thread woke up, so that being woken late does not add up. As
soon as a rank has ended, or this one gives up, nothing is held back any more, and the backend says what is wrong.
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

_LOOK_S = 0.05  # how soon a rank that waits for its link notices that another has ended


@dataclass(frozen=True)
class _Message:
    receiver: int
    duration: float
    release: Callable[[], None]


class Pacer:
    """What this rank has under way on its link.

    Args:
        link: Which it is held to.
        switch: That joins it to the others.
    """

    def __init__(self, link: Link, switch: Switch) -> None:
        self.link, self.switch = link, switch
        self.is_on = False
        """Whether what is sent now is held back."""
        self._outlet: Outlet[_Message] = Outlet(link.bandwidth)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._busy_until = 0.0  # by the backend's own collectives, as far as known
        self._hurries = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    @contextmanager
    def switched(self, is_on: bool) -> Iterator[None]:
        """Inside, what is sent is held back, or is not."""
        before, self.is_on = self.is_on, is_on
        try:
            yield
        finally:
            self.is_on = before

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held back."""
        return not self._due and self._outlet.next_end() is None

    @property
    def free_at(self) -> float:
        """When this rank could start something new."""
        with self._changed:
            self._advance()
            return max(time.monotonic(), self._outlet.all_end(), self._busy_until)

    def send(self, num_bytes: int, receiver: int, release: Callable[[], None]) -> None:
        """Call `release` when a message of `num_bytes` to rank `receiver` has arrived."""
        with self._changed:
            message = _Message(receiver, num_bytes / self.link.bandwidth, release)
            self._outlet.add(message, receiver, num_bytes, self._advance())
            self._changed.notify()

    def collective(self, started: float, seconds: float) -> float:
        """When a collective of the backend's own is over, which takes the whole link, one after the other."""
        with self._changed:
            self._busy_until = max(started, self._busy_until) + seconds
            return self._busy_until

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` in the pacer's thread."""
        with self._changed:
            self._add(when, action)
            self._changed.notify()

    def hurry(self) -> None:
        """Hold nothing back any more."""
        with self._changed:
            self._hurries = True
            self._changed.notify()

    def close(self) -> None:
        """Let all go that is held back, end the thread and leave the switch."""
        with self._changed:
            if self._closed:
                return
            self._hurries = self._closed = True
            self._changed.notify()
        self._thread.join()
        self.switch.close()

    def _add(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), action))

    def _advance(self) -> float:
        """Bring the outlet up to now, and plan when what has left arrives."""
        now = time.monotonic()
        if self._hurries:
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
        """Wait for what is due next; None when there will be nothing more."""
        looked = time.monotonic()
        with self._changed:
            while True:
                now = self._advance()
                if self._due and (self._hurries or self._due[0][0] <= now):
                    return heapq.heappop(self._due)[2]
                wait = self._wait_s(now)
                if wait is None and self._closed:
                    return None
                if wait is not None and now - looked >= _LOOK_S:
                    self._hurries, looked = self.switch.somebody_left(), now
                    continue
                self._changed.wait(wait)
                if wait is None:
                    looked = time.monotonic()

    def _wait_s(self, now: float) -> float | None:
        """How long until something may be due; None where nothing is under way."""
        next_end = self._outlet.next_end()
        ends = [self._due[0][0]] if self._due else []
        ends += [next_end] if next_end is not None else []
        return min(*ends, now + _LOOK_S) - now if ends else None


class PacedSend(dist.Work):
    """A message on its way; to the waiting sender it has left when it has arrived."""

    def __init__(self, send: Callable[[], dist.Work]) -> None:
        super().__init__()
        self._send = send
        self._inner: dist.Work | None = None
        self._error: RuntimeError | None = None
        self._released = threading.Event()

    def release(self) -> None:
        """Hand it to the backend."""
        try:
            self._inner = self._send()
        except RuntimeError as error:  # whoever waits for it is told
            self._error = error
        self._released.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        started = time.monotonic()
        if not self._released.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"Timed out waiting {timeout} for a message to get through the link")
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
    """Sends over a paced link, and receives as the backend does.

    Args:
        inner: What carries the messages.
        pacer: Of this rank.
        rank_of: From a rank of the group to the rank of the whole run that it is.
    """

    def __init__(self, inner: Any, pacer: Pacer, rank_of: Callable[[int], int]) -> None:
        self._inner, self._pacer, self._rank_of = inner, pacer, rank_of
        self.recv, self.recv_anysource = inner.recv, inner.recv_anysource

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        """As `ProcessGroup.send`; leave the tensors alone until the work is waited for."""
        pacer = self._pacer
        if not pacer.is_on and pacer.is_idle:
            work: dist.Work = self._inner.send(tensors, dst, tag)
            return work
        message = PacedSend(lambda: self._inner.send(tensors, dst, tag))
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        pacer.send(size if pacer.is_on else 0, self._rank_of(dst), message.release)
        return message
