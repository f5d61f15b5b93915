"""Memory that the ranks of a group share, which has no name that could be left behind.

Rank 0 creates an anonymous file in memory (`memfd_create`), and the other ranks open it through `/proc`. So `/dev/shm`
is not used, whose size a container limits, and the kernel frees the memory when the last rank ends, however it ends.
Where a rank may not open it, the ranks use a file in `/dev/shm` or the folder for temporary files instead, which is
deleted as soon as all have opened it. Pages take up memory only once a rank has written to them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardscope.training.emulation import VARIABLE
from shardscope.training.transports.shm import futex

PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 16  # at the start of the memory: shows that a rank has opened the right file
_LOCK = struct.Struct("hhqqi")  # `struct flock` of 64-bit Linux: type, whence, start, length, pid


class CannotShare(Exception):
    """Not all ranks can open the same memory; the message says why."""


def this_host() -> str:
    """Return what ranks must have in common to be on one host: its name, kernel and network.

    Ranks in different network namespaces count as different hosts, because their network may be slowed down on purpose.
    """
    boot = network = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()} {boot} {network}"


@dataclass(frozen=True)
class _Created:
    """A new file for the memory: its descriptor, where other ranks find it, and how to delete its name."""

    file: int
    path: str
    forget: Callable[[], None]


def _anonymous(size: int) -> _Created:
    file = os.memfd_create("shardscope", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    return _Created(file, f"/proc/{os.getpid()}/fd/{file}", lambda: None)


def _temporary(size: int) -> _Created:
    folders = [folder for folder in ("/dev/shm", tempfile.gettempdir()) if Path(folder).is_dir()]  # noqa: S108
    for folder in folders:  # the file is private to the user
        file, name = tempfile.mkstemp(prefix="shardscope-", dir=folder)
        forget = Path(name).unlink
        with suppress(OSError):
            os.posix_fallocate(file, 0, size)  # a write to a page without space would kill the process
            return _Created(file, name, forget)
        forget()
        os.close(file)
    raise OSError(errno.ENOSPC, f"no space for {size} bytes in {' or '.join(folders)}")


def why_no_memory() -> str:
    """Return why processes on this machine cannot share memory; empty if this process can open its own by its path."""
    reason = ""
    for create in (_anonymous, _temporary):
        try:
            created = create(PAGE)
            os.close(os.open(created.path, os.O_RDWR))
        except OSError as error:
            reason = reason or str(error)
            continue
        created.forget()
        os.close(created.file)
        return ""
    return f"processes cannot open memory that they share ({reason})"


class SharedMemory:
    """Memory of `size` bytes that all ranks of a group share, initially zero after the first 16 bytes.

    Args:
        store: The group's store, through which the ranks find the memory.
        rank: This rank within the group.
        world_size: Number of ranks in the group.
        size: Size in bytes.

    Raises:
        CannotShare: A rank cannot open the memory; all ranks raise it.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, size: int) -> None:
        self.rank, self.size = rank, size
        hosts = exchange(dist.PrefixStore("hosts", store), rank, world_size, this_host())
        if len(set(hosts)) > 1:
            other = next(r for r, host in enumerate(hosts) if host != hosts[0])
            where = "on different emulated nodes" if VARIABLE in os.environ else "not on the same host"
            raise CannotShare(f"ranks 0 and {other} are {where}")
        self.file = self._join(store, rank, world_size)
        self._map = mmap.mmap(self.file, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.words = memoryview(self._map).cast("I")
        """The memory as 32-bit words."""
        self.counters = memoryview(self._map).cast("Q")
        """The memory as 64-bit words."""

    def _join(self, store: dist.Store, rank: int, world_size: int) -> int:
        refusals: list[str] = []
        for create in (_anonymous, _temporary):
            part = dist.PrefixStore(create.__name__, store)
            file, refusal, forget = self._open(part, create) if rank else self._create(part, create)
            refusals = [
                f"rank {r}: {said}"
                for r, said in enumerate(exchange(part, rank, world_size, refusal))
                if said
            ]
            forget()
            if not refusals:
                assert file is not None
                return file
            if file is not None:
                os.close(file)
        raise CannotShare(f"the ranks cannot open memory that they share ({refusals[0]})")

    def _create(
        self, store: dist.Store, create: Callable[[int], _Created]
    ) -> tuple[int | None, str, Callable[[], None]]:
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            created = create(self.size)
        except OSError as error:
            store.set("place", json.dumps(["", ""]))
            return None, str(error), lambda: None
        os.pwrite(created.file, token, 0)
        store.set("place", json.dumps([created.path, token.hex()]))
        return created.file, "", created.forget

    def _open(
        self,
        store: dist.Store,
        create: Callable[[int], _Created],  # noqa: ARG002 - as `_create`
    ) -> tuple[int | None, str, Callable[[], None]]:
        path, token = json.loads(store.get("place"))
        file = None
        try:
            if path:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if os.pread(file, _TOKEN_BYTES, 0).hex() != token:
                    os.close(file)
                    return None, f"{path} is another file", lambda: None
        except OSError as error:
            return None, str(error), lambda: None
        return file, "", lambda: None

    def tensor(self, start: int, size: int) -> torch.Tensor:
        """Return `size` bytes from position `start` as a flat uint8 tensor."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)

    def hold_presence(self) -> None:
        """Lock this rank's byte behind the end of the memory; the kernel releases it when the process ends."""
        fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.size + self.rank)

    def is_present(self, rank: int) -> bool:
        """Return whether another rank's process still holds its presence."""
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self.size + rank, 1, 0)
        found: int = _LOCK.unpack(fcntl.fcntl(self.file, fcntl.F_GETLK, asked))[0]
        return found != fcntl.F_UNLCK

    def wake(self, word: int) -> None:
        """Wake all waiters on a 32-bit word, given by its index in `words`."""
        futex.wake(self.address + 4 * word)

    def wait(self, word: int, value: int, seconds: float) -> None:
        """Sleep while a 32-bit word has the value `value`, for at most `seconds`; see `futex.wait`."""
        futex.wait(self.address + 4 * word, value, seconds)

    def close(self) -> None:
        """Give up this rank's presence. The memory itself is freed with the last object that uses it."""
        os.close(self.file)


def exchange(store: dist.Store, rank: int, world_size: int, text: str) -> list[str]:
    """Return the texts that all ranks pass to this, by rank."""
    store.set(f"{rank}", f"={text}")  # some stores take no empty value
    return [store.get(f"{peer}").decode()[1:] for peer in range(world_size)]
