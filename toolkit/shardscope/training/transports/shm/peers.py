"""Which ranks of a group still take part, and the errors for those that do not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from enum import IntEnum

import torch.distributed as dist

from shardscope.training.transports.protocol import timed_out
from shardscope.training.transports.shm.files import exchange
from shardscope.training.transports.shm.layout import SharedMemoryLayout
from shardscope.training.transports.shm.memory import SharedMemory

PATIENCE_S = 0.1
"""Time that a rank sleeps before it checks whether the ranks that it waits for are still there, in seconds."""

_LONG_S = 3600.0


class State(IntEnum):
    """State that a rank has announced to the other ranks."""

    OPEN = 0
    CLOSED = 1


class Peers:
    """The ranks of a group, as this rank sees them.

    Each rank has a bell: a word on which its threads sleep while they wait for messages; and an alarm, on which its
    progress thread sleeps while no message is stuck. Each write to a bell or an alarm is of a new value, so a bell that
    has rung always differs from what a waiter has read.

    Args:
        memory: The group's memory.
        layout: Positions within the memory.
        store: The group's store.
        rank: This rank within the group.
        global_rank: This rank in the whole job, for error messages.
    """

    def __init__(
        self, memory: SharedMemory, layout: SharedMemoryLayout, store: dist.Store, rank: int, global_rank: int
    ) -> None:
        self.memory, self.layout, self.rank, self.world_size = memory, layout, rank, layout.world_size
        memory.hold_presence()
        names = exchange(dist.PrefixStore("present", store), rank, self.world_size, f"{global_rank}")
        self.global_ranks = [int(name) for name in names]
        self._rings = itertools.count(1)
        self._why_closed = ""

    def ring(self, rank: int) -> None:
        """Wake the threads of a rank that wait for messages; all earlier writes are visible to them."""
        self._change(self.layout.bell(rank))

    def alarm(self, rank: int) -> None:
        """Wake the progress thread of a rank, because there is no room for a message to or from it."""
        self._change(self.layout.alarm(rank))

    def _change(self, word: int) -> None:
        self.memory.words[word] = (next(self._rings) * self.world_size + self.rank) & 0xFFFFFFFF
        self.memory.wake(word)

    def last_alarm(self) -> int:
        """Return the value of this rank's alarm, for `sleep_until_alarm`."""
        return self.memory.words[self.layout.alarm(self.rank)]

    def sleep_until_alarm(self, alarm: int) -> None:
        """Sleep until this rank's alarm differs from `alarm`."""
        self.memory.wait(self.layout.alarm(self.rank), alarm, _LONG_S)

    def bell(self) -> int:
        """Return the value of this rank's bell, for `sleep`."""
        return self.memory.words[self.layout.bell(self.rank)]

    def sleep(self, bell: int, seconds: float) -> None:
        """Sleep until this rank's bell differs from `bell`, for at most `seconds`."""
        self.memory.wait(self.layout.bell(self.rank), bell, seconds)

    def close(self, reason: str = "Connection closed by this rank") -> None:
        """Announce that this rank no longer takes part, and wake all ranks that wait for it.

        Args:
            reason: Reason, for the errors of this rank's other threads.
        """
        if not self.is_closed:
            self._why_closed = reason
        self.memory.words[self.layout.state(self.rank)] = State.CLOSED
        for rank in range(self.world_size):
            self.ring(rank)
        gate = self.layout.gate
        self.memory.words[gate] = self.memory.words[gate] ^ 0x80000000  # a waiter checks who takes part
        self.memory.wake(gate)

    @property
    def is_closed(self) -> bool:
        """Whether this rank has closed its side."""
        return self._has_left(self.rank)

    def gone(self, ranks: Iterable[int], *, may_leave: bool = False) -> str:
        """Return why one of `ranks` no longer takes part, in words; empty if all do.

        If a rank has ended without leaving first, it is named even if it is not one of `ranks`, because it is the
        reason why other ranks leave.

        Args:
            ranks: Ranks of the group.
            may_leave: Whether to wait even for ranks that have left the group.
        """
        if self.is_closed:
            return self._why_closed
        left = [] if may_leave else [rank for rank in ranks if self._has_left(rank)]
        if not left and all(self._has_left(rank) or self.memory.is_present(rank) for rank in ranks):
            return ""
        for rank in range(self.world_size):
            if rank != self.rank and not self._has_left(rank) and not self.memory.is_present(rank):
                return f"Connection closed by peer: the process of rank {self.global_ranks[rank]} has ended"
        return (
            f"Connection closed by peer: rank {self.global_ranks[left[0]]} has left the group" if left else ""
        )

    def _has_left(self, rank: int) -> bool:
        return self.memory.words[self.layout.state(rank)] != State.OPEN


class Patience:
    """Limits how long a rank waits for other ranks.

    Args:
        peers: The ranks of the group.
        timeout_s: Time after which the wait fails, in seconds.
    """

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        self._peers, self._timeout_s = peers, timeout_s
        self._began = self._checked = time.monotonic()

    def problem(self, ranks: Iterable[int], *, may_leave: bool = False) -> str:
        """Return why waiting for `ranks` cannot succeed, in words; empty if it may. See `Peers.gone`.

        Before raising an error, check the awaited condition once more, because a rank may have met it before leaving.
        """
        now = time.monotonic()
        if now - self._began >= self._timeout_s:
            return timed_out(self._timeout_s)
        if now - self._checked < PATIENCE_S and not self._peers.is_closed:
            return ""
        self._checked = now
        return self._peers.gone(ranks, may_leave=may_leave)

    def next_s(self) -> float:
        """Return how long to sleep before the next check, in seconds."""
        left = self._began + self._timeout_s - time.monotonic()
        return max(0.0, min(PATIENCE_S, left))
