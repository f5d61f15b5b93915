"""Model of the sending side of a network link.

Messages to one receiver leave in order, and the receivers share the bandwidth equally. This approximates TCP with one
connection per receiver and fair sharing. The model only computes times, and receives the current time as an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
_NOTHING = 1e-6  # in bytes; a message with less than this left to send has been sent, up to rounding errors


@dataclass
class _Waiting(Generic[Item]):
    item: Item
    rest: float
    began: float = 0.0


@dataclass(frozen=True)
class DepartedMessage(Generic[Item]):
    """A message that has been sent completely, with the times at which its first and last bytes left, in seconds."""

    item: Item
    first: float
    last: float


class Outlet(Generic[Item]):
    """Models the sending side of one link.

    Args:
        bandwidth: Bandwidth of the link, in bytes per second.
    """

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self._queues: dict[int, deque[_Waiting[Item]]] = {}
        self._clock = 0.0

    def add(self, item: Item, receiver: int, num_bytes: int, now: float) -> None:
        """Append a message to the queue for `receiver`; call ``advance(now)`` first.

        Args:
            item: The message, returned in `DepartedMessage.item`.
            receiver: Rank of the receiver.
            num_bytes: Size of the message.
            now: Current time, in seconds.
        """
        self._clock = now
        queue = self._queues.setdefault(receiver, deque())
        queue.append(_Waiting(item, num_bytes, began=now))

    def next_end(self) -> float | None:
        """Return the time at which the next message will have left if no other is added; None if none is queued."""
        if not self._queues:
            return None
        return self._clock + self._shortest() * len(self._queues) / self.bandwidth

    def all_end(self) -> float:
        """Return the time at which all queued messages will have left."""
        return self._clock + sum(m.rest for queue in self._queues.values() for m in queue) / self.bandwidth

    def advance(self, now: float) -> list[DepartedMessage[Item]]:
        """Advance the model to time `now`; return the messages that have left since the last call, in time order."""
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
        """Remove and return all queued messages, in sending order for each receiver."""
        items = [waiting.item for queue in self._queues.values() for waiting in queue]
        self._queues.clear()
        return items

    def _shortest(self) -> float:
        return min(queue[0].rest for queue in self._queues.values())

    def _serve(self, num_bytes: float) -> None:
        """Subtract `num_bytes` from the first queued message of each receiver."""
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
