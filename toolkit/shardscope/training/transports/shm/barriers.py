"""Barriers: a rank continues when all ranks of the group have arrived.

Each rank counts its arrivals in a word of its own, and sleeps on a common word, the gate. A rank that arrives
and sees that all other ranks have arrived changes the gate and wakes them, so each rank is woken once per
barrier. If two ranks arrive last at the same time, a full memory barrier between writing its own count and
reading the other counts makes sure that at least one of the two sees that all have arrived.
"""

from __future__ import annotations

import torch.distributed as dist

from shardscope.training.transports.shm import futex
from shardscope.training.transports.shm.peers import Patience, Peers


class Barrier:
    """Barriers of all ranks of a group, numbered from 1. All ranks must call them in the same order."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._memory = peers, peers.memory
        ranks = range(peers.world_size)
        self._arrivals = [peers.layout.arrivals_counter(rank) for rank in ranks]
        self._own, self._gate = self._arrivals[peers.rank], peers.layout.gate
        self.number = 0
        """Number of barriers so far."""

    def _missing(self) -> list[int]:
        counters, number = self._memory.counters, self.number
        return [rank for rank, counter in enumerate(self._arrivals) if counters[counter] < number]

    def wait(self, timeout_s: float, purpose: str) -> None:
        """Wait until all ranks have arrived; all their earlier writes are visible afterwards.

        Args:
            timeout_s: Time after which the wait fails, in seconds.
            purpose: What this rank is waiting for, for the error message.

        Raises:
            DistBackendError: A rank is gone, or the wait timed out.
        """
        memory, gate = self._memory, self._gate
        self.number += 1
        futex.order_copies()
        memory.counters[self._own] = self.number
        futex.fence()
        if not self._missing():
            memory.words[gate] = self.number & 0x7FFFFFFF
            memory.wake(gate)
        else:
            self._sleep(timeout_s, purpose)
        futex.order_copies()

    def _sleep(self, timeout_s: float, purpose: str) -> None:
        patience = Patience(self._peers, timeout_s)
        while True:
            seen = self._memory.words[self._gate]
            missing = self._missing()
            if not missing:
                return
            if (problem := patience.problem(missing)) and self._missing():
                self._peers.close(problem)
                raise dist.DistBackendError(f"{problem}, while this rank was waiting for {purpose}")
            self._memory.wait(self._gate, seen, patience.next_s())
