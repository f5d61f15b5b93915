"""Model of the switch that connects the ranks' links, in a small memory shared by all ranks on a machine.

A message that has left its sender must still pass through its receiver's link, which other ranks use as well: if k
workers push to one server at once, the last push takes k times as long. So the recent messages to each rank are visible
to all ranks. A backend collective starts when the last rank arrives, so each rank records its arrival.

The memory is a file that is unlinked once all ranks have opened it, so nothing is left behind if a rank is killed. Each
rank holds a lock on one byte position of the file for as long as its process lives. When the process ends, the
operating system releases the lock, which other ranks can detect.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from shardscope.errors import LaunchError

_MEMORY = Path("/dev/shm")  # noqa: S108 - the file is private to the user; on systems other than Linux it is on disk
_PAIR = struct.Struct("dd")
_REMEMBERED = 64  # number of recent messages to a rank that can delay a new one
_KEPT = 512  # number of collectives that a rank may be ahead of another before its records are overwritten


class SharedFile:
    """Memory of `size` bytes shared by the ranks of one group, initially zero.

    Args:
        store: The group's store, which passes the file's path to the other ranks.
        rank: This rank within the group.
        world_size: Number of ranks in the group.
        size: Size in bytes.

    Raises:
        LaunchError: The ranks are not all on one machine.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, size: int) -> None:
        self.size = size
        self.file = self._create(store) if rank == 0 else self._open(store)
        self.memory = mmap.mmap(self.file, size)
        if store.add("shared-file-open", 1) == world_size:
            store.set("shared-file-ready", "")
        try:
            store.wait(["shared-file-ready"])
        finally:
            if rank == 0:
                self._path.unlink()

    def _create(self, store: dist.Store) -> int:
        file, path = tempfile.mkstemp(prefix="shardscope-link-", dir=_MEMORY if _MEMORY.is_dir() else None)
        self._path = Path(path)
        os.write(file, bytes(self.size))
        store.set("shared-file", f"{socket.gethostname()}:{path}")
        return file

    def _open(self, store: dist.Store) -> int:
        host, path = store.get("shared-file").decode().split(":", 1)
        if host != socket.gethostname():
            raise LaunchError(
                f"link=... emulates a link between ranks on one machine, but these ranks are on {host} and "
                f"{socket.gethostname()}; run them on one machine, or omit link"
            )
        return os.open(path, os.O_RDWR)

    def close(self) -> None:
        """Release the memory and all locks."""
        self.memory.close()
        os.close(self.file)

    @contextmanager
    def locked(self, position: int) -> Iterator[None]:
        """Context that locks the byte at `position` against other processes, but not against other threads."""
        fcntl.lockf(self.file, fcntl.LOCK_EX, 1, position)
        try:
            yield
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, position)


_INBOX = struct.Struct(
    f"{1 + 2 * _REMEMBERED}d"
)  # number of messages so far; start and duration in seconds of each of the last ones
_INBOX_BYTES = _INBOX.size


class Switch:
    """Tracks each rank's incoming link and which ranks are alive.

    Times are in seconds of `time.monotonic`, which all processes on a machine share.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        store = dist.PrefixStore("switch", store)
        self._shared = SharedFile(store, rank, world_size, _INBOX_BYTES * world_size)
        fcntl.lockf(self._shared.file, fcntl.LOCK_EX, 1, self._presence(rank))
        if store.add("present", 1) == world_size:
            store.set("all-present", "")
        store.wait(["all-present"])

    def _presence(self, rank: int) -> int:
        return self._shared.size + rank  # a lock may lie beyond the end of the file

    def receive(self, rank: int, first: float, last: float, duration: float) -> float:
        """Record a message on the incoming link of `rank`, and return the time at which it has arrived.

        In no interval can more arrive than the link carries. Consider all messages, including this one, that started at
        or after some time t: the last of them arrives no earlier than t plus the sum of their durations. This bound is
        applied with t as the start of this message and of each earlier one.

        Args:
            rank: The receiving rank.
            first: Time at which the first byte could arrive.
            last: Time at which the last byte could arrive if there were no other messages.
            duration: Time that the message takes on an otherwise idle link, in seconds.
        """
        position = _INBOX_BYTES * rank
        with self._shared.locked(position):
            inbox = list(_INBOX.unpack_from(self._shared.memory, position))
            number = int(inbox[0])
            slot = 1 + 2 * (number % _REMEMBERED)
            inbox[0], inbox[slot : slot + 2] = number + 1.0, (first, duration)
            _INBOX.pack_into(self._shared.memory, position, *inbox)
        return max(last, _through(sorted(zip(inbox[1::2], inbox[2::2], strict=True), reverse=True), first))

    def somebody_left(self) -> bool:
        """Whether another rank's process has ended, for any reason."""
        return any(self._has_left(rank) for rank in range(self.world_size) if rank != self.rank)

    def _has_left(self, rank: int) -> bool:
        file, position = self._shared.file, self._presence(rank)
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)
            fcntl.lockf(file, fcntl.LOCK_UN, 1, position)
            return True
        return False

    def close(self) -> None:
        """Release the memory and this rank's lock, so that other ranks see that it has left."""
        self._shared.close()


class CollectiveArrivals:
    """The times at which each rank of a group arrived at its collectives, which are numbered from 0."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        size = _PAIR.size * _KEPT * world_size
        self._shared = SharedFile(dist.PrefixStore("arrivals", store), rank, world_size, size)

    def _position(self, number: int, rank: int) -> int:
        return _PAIR.size * (number % _KEPT * self.world_size + rank)

    def note(self, number: int, when: float) -> None:
        """Record that this rank arrived at collective `number` at time `when`."""
        _PAIR.pack_into(self._shared.memory, self._position(number, self.rank), number + 1.0, when)

    def last(self, number: int) -> float:
        """Return the time of the latest arrival so far at collective `number`; this rank must have arrived there."""
        notes = (
            _PAIR.unpack_from(self._shared.memory, self._position(number, rank))
            for rank in range(self.world_size)
        )
        latest: float = max(when for noted, when in notes if noted == number + 1)
        return latest

    def close(self) -> None:
        """Release the memory."""
        self._shared.close()


def _through(latest_first: list[tuple[float, float]], began: float) -> float:
    """Return the latest of the lower bounds described in `Switch.receive` for a message that started at `began`."""
    through, total = 0.0, 0.0
    for start, duration in latest_first:
        total += duration
        if start <= began:
            through = max(through, start + total)
    return through
