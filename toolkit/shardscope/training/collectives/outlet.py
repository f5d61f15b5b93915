"""What a rank's link sends: messages to one receiver in their order, several receivers at once with an even share each.

As TCP would have it: one connection to each peer, all of equal right. Only arithmetic; whoever asks gives the time.
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
class Left(Generic[Item]):
    """A message whose last byte has left: what it was, and when its first and its last byte did, in seconds."""

    item: Item
    first: float
    last: float


class Outlet(Generic[Item]):
    """The sending side of one link.

    Args:
        bandwidth: Bytes a second.
    """

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self._queues: dict[int, deque[_Waiting[Item]]] = {}
        self._clock = 0.0

    def add(self, item: Item, receiver: int, num_bytes: int, now: float) -> None:
        """Send a message after all that are on their way to this receiver; `advance` to `now` before."""
        self._clock = now
        queue = self._queues.setdefault(receiver, deque())
        queue.append(_Waiting(item, num_bytes, began=now))

    def next_end(self) -> float | None:
        """When the next message will have left, as things stand."""
        if not self._queues:
            return None
        return self._clock + self._shortest() * len(self._queues) / self.bandwidth

    def all_end(self) -> float:
        """When all that is there will have left."""
        return self._clock + sum(m.rest for queue in self._queues.values() for m in queue) / self.bandwidth

    def advance(self, now: float) -> list[Left[Item]]:
        """Send until `now`; returns what has left meanwhile, in order."""
        left: list[Left[Item]] = []
        while (end := self.next_end()) is not None and end <= now:
            self._serve(self._shortest())
            self._clock = end
            left += self._take_finished()
        if self._queues:
            self._serve((now - self._clock) * self.bandwidth / len(self._queues))
        self._clock = now
        return left

    def clear(self) -> list[Item]:
        """Take all that is there out, in order for each receiver."""
        items = [waiting.item for queue in self._queues.values() for waiting in queue]
        self._queues.clear()
        return items

    def _shortest(self) -> float:
        return min(queue[0].rest for queue in self._queues.values())

    def _serve(self, num_bytes: float) -> None:
        """Send so much to each receiver."""
        for queue in self._queues.values():
            queue[0].rest -= num_bytes

    def _take_finished(self) -> list[Left[Item]]:
        left = []
        for receiver, queue in list(self._queues.items()):
            if queue[0].rest > _NOTHING:
                continue
            done = queue.popleft()
            left.append(Left(done.item, done.began, self._clock))
            if queue:
                queue[0].began = self._clock
            else:
                del self._queues[receiver]
        return left
