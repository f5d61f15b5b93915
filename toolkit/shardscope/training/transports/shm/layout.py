"""Positions of everything in the shared memory of a group.

    lines of 64 bytes           a token; the gate; of each rank its bell, alarm and counters; of each pipe its two ends
    pipes                       one for each ordered pair of ranks
    slots, results              two sets, each with a slot for each rank and one buffer for results

A word is written by one rank only, except for bells, alarms and the gate (see `Peers` and `Barrier`). Words written by
different ranks are in different cache lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardscope.training.transports.shm.memory import PAGE

_LINE = 64
_MAX_PIPE, _ALL_PIPES = 2 << 20, 24 << 20
_MAX_SLOT, _ALL_SLOTS = 1 << 20, 16 << 20  # twice as large slots do not stay in the caches
_LEAST = 16 * PAGE  # of a pipe or a slot, whatever the number of ranks


@dataclass(frozen=True)
class SharedMemoryLayout:
    """Positions for a group of `world_size` ranks: 10 MiB for 2 ranks, 34 MiB for 4, and at most 40 MiB for more.

    Indices of 32-bit words are named after what they hold; `*_counter` are indices of 64-bit words; `*_start` are
    positions in bytes.
    """

    world_size: int

    @property
    def pipe_bytes(self) -> int:
        """Capacity of each pipe, in bytes."""
        pairs = self.world_size * (self.world_size - 1)
        return max(_LEAST, min(_MAX_PIPE, _ALL_PIPES // max(pairs, 1) // PAGE * PAGE))

    @property
    def slot_bytes(self) -> int:
        """Size of each slot, and of each buffer for results, in bytes."""
        return max(_LEAST, min(_MAX_SLOT, _ALL_SLOTS // (2 * (self.world_size + 1)) // PAGE * PAGE))

    # Lines.

    @property
    def gate(self) -> int:
        """Word on which ranks sleep while they wait at a barrier."""
        return _LINE // 4

    def _rank_line(self, rank: int, which: int) -> int:
        return 2 + 2 * rank + which

    def bell(self, rank: int) -> int:
        """Word on which the threads of a rank sleep while they wait for messages."""
        return self._rank_line(rank, 0) * _LINE // 4

    def alarm(self, rank: int) -> int:
        """Word on which the progress thread of a rank sleeps."""
        return self.bell(rank) + 1

    def state(self, rank: int) -> int:
        """Word with a rank's `State`."""
        return self._rank_line(rank, 1) * _LINE // 4

    def arrivals_counter(self, rank: int) -> int:
        """Number of barriers at which a rank has arrived."""
        return self._rank_line(rank, 1) * _LINE // 8 + 1

    def _pipe_line(self, source: int, target: int, which: int) -> int:
        return 2 + 2 * self.world_size + 2 * (source * self.world_size + target) + which

    def written_counter(self, source: int, target: int) -> int:
        """Number of bytes that have been written to a pipe."""
        return self._pipe_line(source, target, 0) * _LINE // 8

    def wants_room(self, source: int, target: int) -> int:
        """Word that is 1 while the source of a pipe waits for room in it."""
        return self._pipe_line(source, target, 0) * _LINE // 4 + 2

    def read_counter(self, source: int, target: int) -> int:
        """Number of bytes that have been read from a pipe."""
        return self._pipe_line(source, target, 1) * _LINE // 8

    # Data.

    @property
    def _data(self) -> int:
        lines = self._pipe_line(self.world_size, 0, 0)
        return -(-lines * _LINE // PAGE) * PAGE

    def pipe_start(self, source: int, target: int) -> int:
        """Position of a pipe's data."""
        number = source * (self.world_size - 1) + target - (target > source)
        return self._data + number * self.pipe_bytes

    @property
    def _sets(self) -> int:
        return self._data + self.world_size * (self.world_size - 1) * self.pipe_bytes

    def slot_start(self, parity: int, rank: int) -> int:
        """Position of a rank's slot in one of the two sets; the buffer for results follows the slots of all ranks."""
        return self._sets + (parity * (self.world_size + 1) + rank) * self.slot_bytes

    @property
    def size(self) -> int:
        """Size of the whole memory, in bytes."""
        return self.slot_start(2, 0)
