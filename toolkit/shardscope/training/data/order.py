"""Orders in which an epoch visits the rows of a data set; the rows at any position are computed directly.

FullShuffle     all rows, shuffled: for data that can be read anywhere at the same cost
WindowShuffle   shards are shuffled, and rows within a few shards at a time: for data on disk
InOrder         all rows in the order of the data: for streams
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ENDLESS = 2**62
"""Length of a stream, in rows."""


class RowOrder(Protocol):
    """Order of the rows in each epoch; the same on every rank and at any world size."""

    num_rows: int

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the rows at the positions `start` to `stop - 1`, which must exist in the epoch, as int64."""
        ...

    @property
    def identity(self) -> int:
        """Number that changes if the rows or their order change for a reason other than the seed; 0 if they cannot."""
        ...


class FullShuffle:
    """All rows in random order, which depends only on the seed and the epoch."""

    identity = 0

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows, self._seed = num_rows, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the rows at the positions `start` to `stop - 1` of an epoch."""
        if epoch != self._epoch:
            seeds = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
            order = np.random.default_rng(seeds).permutation(self.num_rows)
            self._epoch, self._order = epoch, torch.from_numpy(order)
        return self._order[start:stop]


class InOrder:
    """The rows of a stream, one after another, in a single endless epoch, because the stream restarts when it ends."""

    identity = 0
    num_rows = ENDLESS

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:  # noqa: ARG002
        """Return the rows at the positions `start` to `stop - 1`."""
        return torch.arange(start, stop)


class Window(NamedTuple):
    """Shards whose rows are shuffled together: the epoch, the number of the window in the epoch, and the shards."""

    epoch: int
    number: int
    shards: tuple[int, ...]


class _Epoch(NamedTuple):
    """The order of the shards in an epoch, and the position at which each window starts, followed by the end."""

    shards: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]


class WindowShuffle:
    """Two-level shuffle: the shards in random order, then all rows within each window of `window` shards.

    An epoch visits each row once. Both levels depend only on the seed and the epoch, so the rows at any position follow
    from the lengths of the shards, and at most two windows of row numbers are held in memory.

    Args:
        lengths: Rows of each shard. Rows are numbered through all shards.
        window: Number of shards whose rows are shuffled together.
        seed: Seed for both levels.

    Example:
        >>> order = WindowShuffle([3, 3, 3, 3], window=2, seed=0)
        >>> sorted(order.rows(0, 0, 12).tolist()) == list(range(12))
        True
    """

    def __init__(self, lengths: Sequence[int], window: int, seed: int) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._firsts = np.concatenate([[0], self._lengths.cumsum()])
        self.window, self._seed = min(window, len(lengths)), seed
        self.num_rows = int(self._lengths.sum())
        self._epochs: dict[int, _Epoch] = {}
        self._orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    @property
    def identity(self) -> int:
        """Number that depends on the lengths of the shards and on the window size."""
        return zlib.crc32(np.append(self._lengths, self.window).tobytes()) or 1

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the rows at the positions `start` to `stop - 1` of an epoch."""
        starts = self._of(epoch).starts
        parts = [
            self._shuffled(epoch, window.number)[
                max(0, start - starts[window.number]) : stop - starts[window.number]
            ]
            for window in self.windows(epoch, start, stop)
        ]
        return torch.from_numpy(np.concatenate(parts))

    def windows(self, epoch: int, start: int, stop: int) -> list[Window]:
        """Return the windows that contain the positions `start` to `stop - 1` of an epoch."""
        starts = self._of(epoch).starts
        first, last = np.searchsorted(starts, [start, stop - 1], side="right") - 1
        return [self._window(epoch, number) for number in range(first, last + 1)]

    def after(self, window: Window) -> Window:
        """Return the next window, which may be the first of the next epoch."""
        is_last = window.number + 2 == len(self._of(window.epoch).starts)
        return self._window(window.epoch + is_last, 0 if is_last else window.number + 1)

    def _window(self, epoch: int, number: int) -> Window:
        shards = self._of(epoch).shards[number * self.window : (number + 1) * self.window]
        return Window(epoch, number, tuple(shards.tolist()))

    def _of(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            shards = self._random(epoch).permutation(len(self._lengths))
            ends = self._lengths[shards].cumsum()
            last = len(shards) - 1
            starts = np.concatenate([[0], ends[[*range(self.window - 1, last, self.window), last]]])
            _make_room(self._epochs)
            self._epochs[epoch] = _Epoch(shards, starts)
        return self._epochs[epoch]

    def _shuffled(self, epoch: int, number: int) -> npt.NDArray[np.int64]:
        if (epoch, number) not in self._orders:
            shards = self._window(epoch, number).shards
            rows = np.concatenate([np.arange(self._firsts[each], self._firsts[each + 1]) for each in shards])
            _make_room(self._orders)
            self._orders[epoch, number] = self._random(epoch, number).permutation(rows)
        return self._orders[epoch, number]

    def _random(self, *place: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=place))


def _make_room(known: dict[Any, Any]) -> None:
    """Delete all entries but the newest, so that the cache has two entries after the next is added."""
    while len(known) > 1:
        del known[next(iter(known))]
