"""The switch that the ranks' links lead into: a little memory that all ranks of a machine share.

A message that has left its sender must still get through its receiver's link, which others send to as well: with k
workers pushing to one server, the last push is there after k times as long. So what has lately come to each rank is
known to all of them. A collective that the backend carries out starts when its last rank has come, so each rank notes
when it came.

The memory is a file that has lost its name once all ranks have opened it, so that nothing stays behind, whoever is
killed. For its life each rank holds a lock on one byte of it, which the system takes back the moment the rank ends: so
the others can tell whether it is still there.
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

_MEMORY = Path("/dev/shm")  # noqa: S108 - the file is private to the user; elsewhere than on Linux it is on disk
_PAIR = struct.Struct("dd")
_REMEMBERED = 64  # messages to one rank that a new one is weighed against
_KEPT = 512  # collectives that a rank may be ahead of another, and its notes still be read


class SharedFile:
    """`size` bytes that the ranks of one group share, zero at first.

    Args:
        store: Of the group; tells the other ranks where the file is.
        rank: Within the group.
        world_size: Of the group.
        size: In bytes.

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
                f"link=... holds ranks to a link that one machine makes up, but they are on {host} and "
                f"{socket.gethostname()}; run them on one machine, or leave link out"
            )
        return os.open(path, os.O_RDWR)

    def close(self) -> None:
        """Let go of the memory, and of all locks."""
        self.memory.close()
        os.close(self.file)

    @contextmanager
    def locked(self, position: int) -> Iterator[None]:
        """Inside, no other process is at this byte; threads of one process are not kept apart."""
        fcntl.lockf(self.file, fcntl.LOCK_EX, 1, position)
        try:
            yield
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, position)


_INBOX = struct.Struct(
    f"{1 + 2 * _REMEMBERED}d"
)  # how many so far; when each of the last ones began, and its length
_INBOX_BYTES = _INBOX.size


class Switch:
    """Each rank's way in, and who is there. Times are those of `time.monotonic`, which all processes share."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        store = dist.PrefixStore("switch", store)
        self._shared = SharedFile(store, rank, world_size, _INBOX_BYTES * world_size)
        fcntl.lockf(self._shared.file, fcntl.LOCK_EX, 1, self._presence(rank))
        if store.add("present", 1) == world_size:
            store.set("all-present", "")
        store.wait(["all-present"])

    def _presence(self, rank: int) -> int:
        return self._shared.size + rank  # locks need no bytes under them

    def receive(self, rank: int, first: float, last: float, duration: float) -> float:
        """Let a message into `rank`; returns when it is through.

        In no stretch of time may more come in than the link carries: of all that began to come in after some moment,
        this message included, the last is through after all their durations at the earliest. That is so for the moment
        at which this one began, and those at which the ones before it did.

        Args:
            rank: The receiver.
            first: When the first byte could be there.
            last: When the last byte could be there if nothing else came in.
            duration: Of the message alone on the link, in seconds.
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
        """Whether another rank's process has ended, however it did."""
        return any(self._has_left(rank) for rank in range(self.world_size) if rank != self.rank)

    def _has_left(self, rank: int) -> bool:
        file, position = self._shared.file, self._presence(rank)
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)
            fcntl.lockf(file, fcntl.LOCK_UN, 1, position)
            return True
        return False

    def close(self) -> None:
        """Leave."""
        self._shared.close()


class Arrivals:
    """When each rank of a group came to each of its collectives, which are numbered from 0."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        size = _PAIR.size * _KEPT * world_size
        self._shared = SharedFile(dist.PrefixStore("arrivals", store), rank, world_size, size)

    def _position(self, number: int, rank: int) -> int:
        return _PAIR.size * (number % _KEPT * self.world_size + rank)

    def note(self, number: int, when: float) -> None:
        """This rank has come to collective `number`."""
        _PAIR.pack_into(self._shared.memory, self._position(number, self.rank), number + 1.0, when)

    def last(self, number: int) -> float:
        """When the last of the ranks came that have come to collective `number`; this one has."""
        notes = (
            _PAIR.unpack_from(self._shared.memory, self._position(number, rank))
            for rank in range(self.world_size)
        )
        latest: float = max(when for noted, when in notes if noted == number + 1)
        return latest

    def close(self) -> None:
        """Let go of the memory."""
        self._shared.close()


def _through(latest_first: list[tuple[float, float]], began: float) -> float:
    """The latest of all ends that the messages which began at some moment or later put on one that `began` then."""
    through, total = 0.0, 0.0
    for start, duration in latest_first:
        total += duration
        if start <= began:
            through = max(through, start + total)
    return through
