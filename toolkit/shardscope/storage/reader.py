"""Prefetches shards during training, several at a time, and counts cache hits.

A rank keeps the shards of two windows open: the one that it trains on, and the next. An open shard is a mapping of a
file, whose pages the operating system reads and drops as needed, so memory does not grow with the data.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shardscope.errors import DataError
from shardscope.spec.link import Link
from shardscope.spec.shards import Shards
from shardscope.spec.units import bytes_text
from shardscope.storage.cache import ShardCache, make_private
from shardscope.storage.caches import default_root
from shardscope.storage.formats import Array, ShardFormat, ShardInfo, require_alike

_LOOK_EVERY_S = 1.0
"""Interval between checks that the file of an open shard has not changed, in seconds."""
_THREADS = 4
"""Number of shards that a rank opens or fetches at the same time."""
UNPACKED_BYTES = 10e9
"""Default size limit of the cache for formats that are unpacked into it, in bytes."""


@dataclass
class ReadCounts:
    """Counts of one rank's reads of shards in one epoch.

    Attributes:
        opened: Number of shards opened; with a cache, each shard counts once per epoch.
        hits: Number of these shards that were still open or in the cache, possibly fetched by another rank.
        fetched_bytes: Number of bytes read from a source that is cached or emulated.
    """

    opened: int = 0
    hits: int = 0
    fetched_bytes: int = 0


class ShardReader:
    """Opens the shards of a data set.

    Args:
        shards: The shards in their format.
        spec: Settings for caching and reading the shards.

    Raises:
        DataError: The cache cannot be used, or does not hold the shards of one window.
    """

    def __init__(self, shards: ShardFormat, spec: Shards) -> None:
        self.shards, self.spec = shards, spec
        self._stamps = [info.stamp for info in shards.shards]
        self._samples: dict[int, str] = {}  # of each shard that was opened
        self._looked_s: dict[int, float] = {}  # when each shard's file was last compared with its stamp
        self.cache = _cache_of(shards, spec)
        self._pace = None if spec.slow is None else Pace(spec.slow)
        self._open: OrderedDict[int, Future[Array]] = OrderedDict()
        self._announced: set[tuple[int, int]] = set()
        self._epoch = 0
        self._counts: dict[int, ReadCounts] = {}
        self._uncounted: set[int] = set()  # fetched before they were announced, as for the model's example
        self._kind: tuple[Path, object] | None = None
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def announce(self, epoch: int, window: int, shards: Sequence[int], *, is_next: bool) -> None:
        """Start opening the shards of a window, several at a time; a no-op if it was already called for this window.

        Args:
            epoch: The epoch in which the shards are used.
            window: Number of the window in that epoch.
            shards: The shards, in the order in which this rank opens them.
            is_next: Whether the window is prefetched, while an earlier one is in use.
        """
        with self._lock:
            if not is_next:
                self._epoch = epoch
            if (epoch, window) in self._announced or (is_next and not self._holds_two_windows):
                return
            if window == 0:
                self._announced = {each for each in self._announced if each[0] == epoch - 1}
            self._announced.add((epoch, window))
            for shard in shards:
                if shard in self._open and self.cache is not None:
                    self._count(epoch, opened=1, hits=int(shard not in self._uncounted))
                    self._uncounted.discard(shard)
                self._opening(shard, epoch)

    def rows(self, places: Mapping[int, int]) -> dict[int, Array]:
        """Return the rows of shards as arrays, memory-mapped where possible, by shard.

        With an emulated source and no cache, this takes as long as reading the rows in `places` from the source.

        Args:
            places: Number of rows that the caller will read from each shard.
        """
        started = time.monotonic()
        with self._lock:
            opening = {shard: self._opening(shard, None) for shard in places}
        found = {shard: future.result() for shard, future in opening.items()}
        for shard in places:
            if started - self._looked_s.get(shard, 0.0) > _LOOK_EVERY_S:
                self._require_unchanged(shard)
        if self._pace is not None and self.cache is None:
            num_bytes = sum(self._row_bytes(shard) * count for shard, count in places.items())
            self._pace.wait(num_bytes, started)
            with self._lock:
                self._count(self._epoch, fetched_bytes=round(num_bytes))
        return found

    def take_counts(self) -> dict[int, ReadCounts]:
        """Return the counts since the last call, by epoch."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    def hurry(self) -> None:
        """End all waits for an emulated source, so that prefetching threads can end."""
        if self._pace is not None:
            self._pace.close()

    def close(self) -> None:
        """Stop prefetching; reads in progress are completed, without waiting for an emulated source."""
        self.hurry()
        with self._lock:
            pool, self._pool = self._pool, None
            self._open.clear()
            self._announced.clear()
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    @property
    def _holds_two_windows(self) -> bool:
        return self.cache is None or self.cache.most_bytes >= 2 * _window_bytes(self.shards, self.spec)

    def _row_bytes(self, shard: int) -> float:
        info = self.shards.shards[shard]
        return info.num_bytes / max(1, info.rows)

    def _opening(self, shard: int, epoch: int | None) -> Future[Array]:
        """Return a future for a shard's rows; the caller holds the lock. `epoch` is None for reads on demand."""
        future = self._open.get(shard)
        if future is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardscope-shards")
            future = self._open[shard] = self._pool.submit(self._read, shard, epoch)
            while len(self._open) > 2 * self.spec.window + _THREADS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return future

    def _read(self, shard: int, epoch: int | None) -> Array:
        """Return the rows of a shard from the cache, or mapped in place."""
        info = self.shards.shards[shard]
        self._require_unchanged(shard)
        if self.cache is None:
            return self._checked(self.shards.read(shard), info)
        name = f"{shard:06d}-{self._stamps[shard]}"
        rows, was_there = self.cache.get(name, partial(self._fetch, shard))
        with self._lock:
            if epoch is not None:
                self._count(epoch, opened=1, hits=int(was_there))
            elif not was_there:
                self._uncounted.add(shard)
            if not was_there:
                self._count(self._epoch if epoch is None else epoch, fetched_bytes=info.num_bytes)
        return self._checked(rows, info)

    def _require_unchanged(self, shard: int) -> None:
        """Reject a shard whose content has changed since it was first opened; an open shard's file may be deleted."""
        self._looked_s[shard] = time.monotonic()
        info = self.shards.shards[shard]
        try:
            stamp = info.stamp
            if stamp == self._stamps[shard] and shard in self._samples:
                return
            if (
                info.path.stat().st_size == info.num_bytes
            ):  # a file may be touched or moved, or its time be rounded
                sample = info.sample
                if sample == self._samples.setdefault(shard, sample):
                    self._stamps[shard] = stamp
                    return
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(
                f"{info.path} can no longer be read ({error.strerror}); restore the file, and resume from the last "
                "checkpoint"
            ) from error
        raise DataError(
            f"{info.path} was written while it was in use, so its rows are no longer those that training began "
            "with; keep shards as they are during a run, and write new ones into another folder"
        )

    def _checked(self, rows: Array, info: ShardInfo) -> Array:
        """Return the rows, after checking that they have the type of the first shard's rows; some formats do
        not declare it.
        """
        found = (info.path, str(rows.dtype))
        with self._lock:
            self._kind = self._kind or found
        require_alike([self._kind, found])
        return rows

    def _fetch(self, shard: int, file: BinaryIO) -> None:
        """Copy a shard into the cache, as an array; takes at least as long as a read from the emulated source."""
        started = time.monotonic()
        np.lib.format.write_array(file, np.asarray(self.shards.read(shard)), allow_pickle=False)
        if self._pace is not None:
            self._pace.wait(self.shards.shards[shard].num_bytes, started)

    def _count(self, epoch: int, *, opened: int = 0, hits: int = 0, fetched_bytes: int = 0) -> None:
        counts = self._counts.setdefault(epoch, ReadCounts())
        counts.opened += opened
        counts.hits += hits
        counts.fetched_bytes += fetched_bytes


def cache_limit(shards: ShardFormat, spec: Shards) -> float | None:
    """Return the size limit of the cache of a data set, in bytes; None if its shards are mapped in place.

    Raises:
        DataError: `cache_folder` is set, but there is no cache.
    """
    if spec.cache is not None or not shards.is_mapped:
        return UNPACKED_BYTES if spec.cache is None else spec.cache
    if spec.cache_folder is not None:
        raise DataError(
            f"cache_folder={spec.cache_folder!r} has no effect on .npy shards without a cache; set its size, such as "
            "cache='1 GB', or leave cache_folder out"
        )
    return None


def _cache_of(shards: ShardFormat, spec: Shards) -> ShardCache | None:
    """Return the cache of a data set, in a folder of its own; None if its shards are mapped in place."""
    limit = cache_limit(shards, spec)
    if limit is None:
        return None
    needed = _window_bytes(shards, spec)
    if limit < needed:
        raise DataError(
            f"cache={bytes_text(limit)} does not hold the {min(spec.window, len(shards.shards))} shards that are "
            f"shuffled together; use at least {bytes_text(needed)}, or a smaller window"
        )
    told = (str(shards.shards[0].path.resolve().parent), shards.columns)
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    root = default_root() if spec.cache_folder is None else Path(spec.cache_folder).expanduser().absolute()
    make_private(root)  # whoever can write to it can replace the folder in it
    needed = sum(shard.unpacked_bytes for shard in shards.shards)
    return ShardCache(root / digest, limit, told[0], needed)


def _window_bytes(shards: ShardFormat, spec: Shards) -> int:
    """Return the maximum size of one window's shards in the cache, in bytes."""
    return sum(sorted((shard.unpacked_bytes for shard in shards.shards), reverse=True)[: spec.window])


class Pace:
    """The emulated connection of one rank: concurrent reads share its bandwidth, while their latencies overlap.

    Args:
        link: Bandwidth and latency of the connection.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def wait(self, num_bytes: float, started: float) -> None:
        """Sleep until a read of `num_bytes`, which began at `started` (`time.monotonic`), would be complete.

        The time that the actual read took counts toward this time. Returns early if the connection is closed.
        """
        with self._lock:
            self._free_at = max(self._free_at, started) + num_bytes / self._link.bandwidth
            until = self._free_at + self._link.latency_s
        self._closed.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End all waits, so that prefetching threads can end."""
        self._closed.set()
