"""The sending side of a rank's link: messages to one receiver go in order, several receivers share the link evenly.

This models TCP with one connection to each peer and fair sharing. It is only arithmetic; the caller passes the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
_NOTHING = 1e-6  # bytes: less is a rounding error


@dataclass
class _Waiting(Generic[Item]):
    item: Item
    rest: float
    began: float = 0.0


@dataclass(frozen=True)
class DepartedMessage(Generic[Item]):
    """A message whose last byte has left, and when its first and last bytes left, in seconds."""

    item: Item
    first: float
    last: float


class Outlet(Generic[Item]):
    """The sending side of one link.

    Args:
        bandwidth: Bytes per second.
    """

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self._queues: dict[int, deque[_Waiting[Item]]] = {}
        self._clock = 0.0

    def add(self, item: Item, receiver: int, num_bytes: int, now: float) -> None:
        """Queue a message after all others to this receiver; call `advance` to `now` before."""
        self._clock = now
        queue = self._queues.setdefault(receiver, deque())
        queue.append(_Waiting(item, num_bytes, began=now))

    def next_end(self) -> float | None:
        """Time at which the next message will have left, if no more are added; None if there are none."""
        if not self._queues:
            return None
        return self._clock + self._shortest() * len(self._queues) / self.bandwidth

    def all_end(self) -> float:
        """Time at which all queued messages will have left."""
        return self._clock + sum(m.rest for queue in self._queues.values() for m in queue) / self.bandwidth

    def advance(self, now: float) -> list[DepartedMessage[Item]]:
        """Send until `now`; returns the messages that have left meanwhile, in order."""
        left: list[DepartedMessage[Item]] = []
        while (end := self.next_end()) is not None and end <= now:
            self._serve(self._shortest())
            self._clock = end
            left += self._take_finished()
        if self._queues:
            self._serve((now - self._clock) * self.bandwidth / len(self._queues))
        self._clock = now
        return left

    def clear(self) -> list[Item]:
        """Remove and return all queued messages, in order for each receiver."""
        items = [waiting.item for queue in self._queues.values() for waiting in queue]
        self._queues.clear()
        return items

    def _shortest(self) -> float:
        return min(queue[0].rest for queue in self._queues.values())

    def _serve(self, num_bytes: float) -> None:
        """Send `num_bytes` to each receiver."""
        for queue in self._queues.values():
            queue[0].rest -= num_bytes

    def _take_finished(self) -> list[DepartedMessage[Item]]:
        left = []
        for receiver, queue in list(self._queues.items()):
            if queue[0].rest > _NOTHING:
                continue
            done = queue.popleft()
            left.append(DepartedMessage(done.item, done.began, self._clock))
            if queue:
                queue[0].began = self._clock
            else:
                del self._queues[receiver]
        return left
