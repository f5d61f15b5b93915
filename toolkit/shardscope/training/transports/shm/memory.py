"""Memory that the ranks of a group share; it is anonymous, so no file is left behind if a rank is killed.

Rank 0 creates a file in memory without a name, and passes it on to the other ranks; see `files`. By default it is
outside `/dev/shm`, whose size a container limits. The kernel frees it when the last rank ends, however it ends. Pages
take up memory only once a rank has written to them.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import secrets
import socket
import struct
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.runlog.clock import boot_id
from shardscope.training.emulation import VARIABLE
from shardscope.training.transports.shm import files, futex

PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 16  # at the start of the memory: shows that a rank has opened the right file
_CANNOT = "the ranks cannot open memory that they share"
_WAYS = (files.through_proc, files.over_sockets)
_LOCK = struct.Struct("hhqqi")  # `struct flock` of 64-bit Linux: type, whence, start, length, pid


class CannotShare(Exception):
    """Not all ranks can open the same memory; the message says why."""


def this_host() -> str:
    """Return the values that all ranks on one host have in common: its name, kernel and network.

    Ranks in different network namespaces count as different hosts, because the network between them may be throttled on
    purpose.
    """
    network = ""
    with suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()} {boot_id()} {network}"


def address_of(tensor: Tensor) -> int:
    """Return the address of a contiguous tensor.

    Raises:
        ValueError: The tensor has elements, but no memory; copying from its address would crash the process.
    """
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise ValueError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its own; pass a copy"
        )
    return address


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
        hosts = files.exchange(dist.PrefixStore("hosts", store), rank, world_size, this_host())
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
        """Return the descriptor of the memory."""
        own, token = self._create(dist.PrefixStore("new", store), rank, world_size)
        for obtain in _WAYS:
            part, file, refusal = dist.PrefixStore(obtain.__name__, store), None, ""
            try:
                file = obtain(part, rank, world_size, own)
                if os.pread(file, _TOKEN_BYTES, 0).hex() != token:
                    refusal = "it opened another file"
            except OSError as error:
                refusal = str(error)
            said = files.exchange(dist.PrefixStore("refusals", part), rank, world_size, refusal)
            refusals = [f"rank {r}: {text}" for r, text in enumerate(said) if text]
            if not refusals:
                assert file is not None
                return file
            if file is not None and file != own:
                os.close(file)
        if own is not None:
            os.close(own)
        raise CannotShare(f"{_CANNOT} ({refusals[0]})")

    def _create(self, store: dist.Store, rank: int, world_size: int) -> tuple[int | None, str]:
        """Create the memory on rank 0. Return its descriptor (None on other ranks) and its token."""
        file, token, refusal = None, secrets.token_hex(_TOKEN_BYTES), ""
        if rank == 0:
            try:
                file = files.create(self.size)
                os.pwrite(file, bytes.fromhex(token), 0)
            except OSError as error:
                refusal = str(error)
        token, refusal = json.loads(files.exchange(store, rank, world_size, json.dumps([token, refusal]))[0])
        if refusal:
            raise CannotShare(f"{_CANNOT} (rank 0: {refusal})")
        return file, token

    def tensor(self, start: int, size: int) -> torch.Tensor:
        """Return `size` bytes from position `start` as a flat uint8 tensor."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)

    def hold_presence(self) -> None:
        """Lock this rank's byte after the end of the memory; the kernel releases the lock when the process ends."""
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
