"""Pipes: the bytes of one rank's messages to another, in the order in which they are sent.

A pipe is a ring buffer in shared memory. The source counts the bytes that it has written, and the target those that it
has read; each count is written by one rank only. A message is a header of one cache line with its tag and size,
followed by its data, padded to whole lines. A message may be larger than the pipe: its data is written as the target
makes room.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Protocol

from shardscope.training.transports.shm import futex
from shardscope.training.transports.shm.peers import Peers

LINE = 64
PIECE_BYTES = 1 << 20
"""Maximum data per announcement, in bytes; the target copies one piece while the source writes the next."""


class MessageSource(Protocol):
    """A message to send."""

    tag: int
    address: int
    size: int

    def finished(self) -> None:
        """Called when all of the message has been written to the pipe."""


class Target(Protocol):
    """A message to receive."""

    def take(self, address: int, offset: int, size: int) -> None:
        """Take the piece of the message from `offset` on: `size` bytes at `address`, in whole cache lines."""

    def finished(self) -> None:
        """Called when all of the message has been read from the pipe."""


class Accepts(Protocol):
    """Function that decides where a message goes."""

    def __call__(self, source: int, tag: int, size: int) -> Target | None:
        """Return the target of a message of `size` bytes; None to leave it in the pipe for now."""


def padded(size: int) -> int:
    """Return the number of bytes that data of `size` bytes takes up in a pipe."""
    return -(-size // LINE) * LINE


class _End:
    """Base class of both ends of a pipe."""

    def __init__(self, peers: Peers, source: int, target: int) -> None:
        layout = peers.layout
        self._peers, self._counters, self._words = peers, peers.memory.counters, peers.memory.words
        self._start, self._capacity = layout.pipe_start(source, target), layout.pipe_bytes
        self._base = peers.memory.address + self._start
        self._written = layout.written_counter(source, target)
        self._read = layout.read_counter(source, target)
        self._wants_room = layout.wants_room(source, target)
        self._position = 0  # bytes that this end has written or read

    def _spans(self, count: int) -> tuple[tuple[int, int], ...]:
        """Return the addresses and sizes of the one or two spans of memory for the next `count` bytes."""
        offset = self._position % self._capacity
        first = min(count, self._capacity - offset)
        if first == count:
            return ((self._base + offset, count),)
        return ((self._base + offset, first), (self._base, count - first))

    def _header(self) -> int:
        """Return the index of the 64-bit word at which the next header begins."""
        return (self._start + self._position % self._capacity) // 8


class Outgoing(_End):
    """The end of a pipe at which this rank writes.

    Args:
        peers: The ranks of the group.
        target: The rank that reads.
    """

    def __init__(self, peers: Peers, target: int) -> None:
        super().__init__(peers, peers.rank, target)
        self.target = target
        self.queue: deque[MessageSource] = deque()
        self._offset = -1  # within the data of the first message; -1 before its header

    def push(self) -> bool:
        """Write as much of the queued messages as there is room for; return whether anything was written."""
        moved = False
        while self.queue:
            while self.queue and self._write(self.queue[0]):
                moved = True
            if not self.queue:
                break
            was_stuck, self._words[self._wants_room] = self._words[self._wants_room], 1
            futex.fence()  # the target reads the word after it has made room, so one of us sees the other's write
            if self._room() < LINE:
                if not was_stuck:
                    self._peers.alarm(self.target)
                return moved
        self._words[self._wants_room] = 0
        return moved

    def _room(self) -> int:
        return self._capacity - self._position + self._counters[self._read]

    def _write(self, message: MessageSource) -> bool:
        """Write the next piece of a message, and announce it; return False if there is no room."""
        room = self._room()
        if room < LINE:
            return False
        futex.order_copies()
        if self._offset < 0:
            header = self._header()
            self._counters[header], self._counters[header + 1] = message.tag, message.size
            self._position, self._offset, room = self._position + LINE, 0, room - LINE
        count = min(message.size - self._offset, room, PIECE_BYTES)
        for address, size in self._spans(count):
            ctypes.memmove(address, message.address + self._offset, size)
            self._offset += size
        self._position += padded(count)
        is_finished = self._offset == message.size
        futex.order_copies()
        self._counters[self._written] = self._position
        self._peers.ring(self.target)
        if is_finished:
            self._offset = -1
            self.queue.popleft()
            message.finished()
        return True


class Incoming(_End):
    """The end of a pipe at which this rank reads.

    Args:
        peers: The ranks of the group.
        source: The rank that writes.
        accepts: Decides where each message goes.
    """

    def __init__(self, peers: Peers, source: int, accepts: Accepts) -> None:
        super().__init__(peers, source, peers.rank)
        self.source, self._accepts = source, accepts
        self._target: Target | None = None
        self._offset = self._size = 0

    @property
    def is_stuck(self) -> bool:
        """Whether the source waits for room."""
        return bool(self._words[self._wants_room])

    def pull(self) -> bool:
        """Read all messages that have arrived and are accepted; return whether anything was read."""
        moved = False
        while self._available() >= LINE:
            if self._target is None and not self._open():
                break
            self._copy()
            moved = True
        return moved

    def _available(self) -> int:
        return self._counters[self._written] - self._position

    def _open(self) -> bool:
        """Read a header, if its message is accepted."""
        futex.order_copies()
        header = self._header()
        tag, size = self._counters[header], self._counters[header + 1]
        self._target = self._accepts(self.source, tag, size)
        if self._target is None:
            return False
        self._offset, self._size = 0, size
        self._position += LINE
        return True

    def _copy(self) -> None:
        """Copy the next piece of a message, and make room in the pipe."""
        assert self._target is not None
        available = self._available()
        futex.order_copies()
        count = min(self._size - self._offset, available, PIECE_BYTES)
        for address, size in self._spans(count):
            self._target.take(address, self._offset, size)
            self._offset += size
        self._position += padded(count)
        futex.order_copies()
        self._counters[self._read] = self._position
        futex.fence()
        if self._words[self._wants_room]:
            self._peers.ring(self.source)
        if self._offset == self._size:
            target, self._target = self._target, None
            target.finished()
