"""Model of the switch that connects the links of all ranks; its state is in memory that the ranks share.

After a message has left its sender, it must pass through the receiver's link, which other ranks use as well: if k
workers send to one parameter server at once, the last message takes k times as long. So the recent messages to each
rank are stored in shared memory. A backend collective starts when the last rank arrives, so each rank also
stores the times at which it arrives.

The shared memory is a file that is unlinked when all ranks have opened it, so no file remains if a rank is killed. Each
rank locks one byte position of the file. When the rank's process exits, the operating system releases the lock, and
other ranks can detect this.
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
from shardscope.runlog.clock import boot_id
from shardscope.training.emulation import VARIABLE as EMULATED

_MEMORY = Path("/dev/shm")  # noqa: S108 - the file is private to the user; on systems other than Linux it is on disk
_PAIR = struct.Struct("dd")
_NUM_MESSAGES = 64  # number of recent messages per receiver that can delay a new one
_NUM_COLLECTIVES = (
    512  # number of collectives by which ranks may be apart before arrival times are overwritten
)


class SharedFile:
    """Memory of `size` bytes that the ranks of a group share, initially zero.

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
        store.set("shared-file", f"{_this_machine()}:{path}")
        return file

    def _open(self, store: dist.Store) -> int:
        machine, path = store.get("shared-file").decode().split(":", 1)
        if machine != _this_machine():
            raise LaunchError(
                f"link=... emulates a link between ranks on one machine, but the ranks are on {machine} and "
                f"{_this_machine()}; run all ranks on one machine, or omit link"
            )
        return os.open(path, os.O_RDWR)

    def close(self) -> None:
        """Release the memory and all locks."""
        self.memory.close()
        os.close(self.file)

    @contextmanager
    def locked(self, position: int) -> Iterator[None]:
        """Return a context manager that locks the byte at `position` against other processes, but not other threads."""
        fcntl.lockf(self.file, fcntl.LOCK_EX, 1, position)
        try:
            yield
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, position)


def _this_machine() -> str:
    """Return an identifier of the machine; emulated nodes have their own host name but share the machine's memory."""
    return (boot_id() if EMULATED in os.environ else "") or socket.gethostname()


_INBOX = struct.Struct(
    f"{1 + 2 * _NUM_MESSAGES}d"
)  # the number of messages so far, then the start and the duration in seconds of each recent message
_INBOX_BYTES = _INBOX.size


class Switch:
    """Records the messages on each rank's incoming link, and which ranks are still running.

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
        """Record a message on the incoming link of `rank`, and return the time at which its last byte arrives.

        Of all messages, including this one, that start at or after a time t, the last cannot arrive before t plus the
        sum of their durations, because the link carries one byte at a time. This bound is computed with t equal to the
        start of this message and of each earlier one; the latest bound applies.

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
            slot = 1 + 2 * (number % _NUM_MESSAGES)
            inbox[0], inbox[slot : slot + 2] = number + 1.0, (first, duration)
            _INBOX.pack_into(self._shared.memory, position, *inbox)
        return max(
            last, _latest_bound(sorted(zip(inbox[1::2], inbox[2::2], strict=True), reverse=True), first)
        )

    def any_rank_exited(self) -> bool:
        """Return whether any other rank's process has exited."""
        return any(self._has_exited(rank) for rank in range(self.world_size) if rank != self.rank)

    def _has_exited(self, rank: int) -> bool:
        file, position = self._shared.file, self._presence(rank)
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)
            fcntl.lockf(file, fcntl.LOCK_UN, 1, position)
            return True
        return False

    def close(self) -> None:
        """Release the memory and this rank's lock, so that other ranks see that this rank has exited."""
        self._shared.close()


class CollectiveArrivals:
    """Stores the times at which the ranks of a group arrive at each collective; collectives are numbered from 0."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        size = _PAIR.size * _NUM_COLLECTIVES * world_size
        self._shared = SharedFile(dist.PrefixStore("arrivals", store), rank, world_size, size)

    def _position(self, number: int, rank: int) -> int:
        return _PAIR.size * (number % _NUM_COLLECTIVES * self.world_size + rank)

    def note(self, number: int, when: float) -> None:
        """Record that this rank arrived at collective `number` at time `when`."""
        _PAIR.pack_into(self._shared.memory, self._position(number, self.rank), number + 1.0, when)

    def last(self, number: int) -> float:
        """Return the time of the latest arrival so far at collective `number`; this rank must have arrived at it."""
        notes = (
            _PAIR.unpack_from(self._shared.memory, self._position(number, rank))
            for rank in range(self.world_size)
        )
        latest: float = max(when for noted, when in notes if noted == number + 1)
        return latest

    def close(self) -> None:
        """Release the memory."""
        self._shared.close()


def _latest_bound(latest_first: list[tuple[float, float]], began: float) -> float:
    """Return the latest of the bounds that `Switch.receive` describes, for a message that started at `began`.

    Args:
        latest_first: Start and duration of each message, the latest start first.
        began: Start of the message.
    """
    through, total = 0.0, 0.0
    for start, duration in latest_first:
        total += duration
        if start <= began:
            through = max(through, start + total)
    return through
