"""Anonymous files in memory, and the two ways in which the ranks of a host open the file that rank 0 creates.

A file without a name needs no cleaning up: the kernel frees it when the last process that has it open ends, however
it ends. Only processes of the same user can obtain it.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import tempfile
from contextlib import closing, suppress

import torch.distributed as dist

_CREDENTIALS = struct.Struct("3i")  # `struct ucred`: process, user and group


def exchange(store: dist.Store, rank: int, world_size: int, text: str) -> list[str]:
    """Exchange one text per rank; return the texts of all ranks, in rank order."""
    store.set(f"{rank}", f"={text}")  # some stores take no empty value
    return [store.get(f"{peer}").decode()[1:] for peer in range(world_size)]


def create(size: int) -> int:
    """Return the descriptor of a new file of `size` bytes: an anonymous one, or else one in `/dev/shm` or on disk.

    Raises:
        OSError: The system allows none of these, or has no space for the file.
    """
    try:
        file = os.memfd_create("shardscope", os.MFD_CLOEXEC)
    except OSError as refusal:
        return _in_a_folder(size, refusal)
    os.fchmod(file, 0o600)
    os.ftruncate(file, size)
    return file


def _in_a_folder(size: int, refusal: OSError) -> int:
    reasons = [f"memfd_create: {refusal.strerror}"]
    for folder in dict.fromkeys(["/dev/shm", tempfile.gettempdir()]):  # noqa: S108 - the file is private to the user
        try:
            file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL, 0o600)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        try:
            os.posix_fallocate(file, 0, size)  # a write to a page without space would kill the process
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            os.close(file)
            continue
        return file
    raise OSError(errno.ENOSPC, f"no file of {size} bytes without a name ({'; '.join(reasons)})")


def through_proc(store: dist.Store, rank: int, world_size: int, own: int | None) -> int:
    """Return rank 0's file, which the other ranks open by its path in `/proc`.

    Args:
        store: Store of the ranks, for this call only.
        rank: This rank.
        world_size: Number of ranks.
        own: On rank 0, the descriptor of the file; None on other ranks.

    Raises:
        OSError: This rank cannot open the file.
    """
    path = "" if own is None else f"/proc/{os.getpid()}/fd/{own}"
    path = exchange(store, rank, world_size, path)[0]
    return os.open(path, os.O_RDWR | os.O_CLOEXEC) if own is None else own


def over_sockets(store: dist.Store, rank: int, world_size: int, own: int | None) -> int:
    """Return rank 0's file, which it sends to the other ranks over Unix sockets; see `through_proc`.

    No rank waits for a connection, because rank 0 connects before the other ranks accept.
    """
    inbox, address, refusal = None, "", "rank 0 sent nothing"
    if own is None:
        try:
            inbox = socket.socket(socket.AF_UNIX)
            address = f"shardscope-{secrets.token_hex(16)}"
            inbox.bind(f"\0{address}")  # abstract: in no file system, and gone with the socket
            inbox.listen(1)
        except OSError as error:
            address, refusal = "", str(error)
    addresses = exchange(dist.PrefixStore("inboxes", store), rank, world_size, address)
    if own is not None:
        for each in filter(None, addresses):
            with suppress(OSError):  # that rank reports it
                _send(own, each)
    exchange(dist.PrefixStore("sent", store), rank, world_size, "")
    if own is not None:
        return own
    try:
        assert inbox is not None
        return _receive(inbox, refusal)
    finally:
        if inbox is not None:
            inbox.close()


def _send(file: int, address: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")
        _require_same_user(connection)
        socket.send_fds(connection, [b"f"], [file])


def _receive(inbox: socket.socket, refusal: str) -> int:
    inbox.setblocking(False)
    try:
        connection, _ = inbox.accept()
    except OSError:
        raise OSError(errno.ECONNREFUSED, refusal) from None
    with closing(connection):
        _require_same_user(connection)
        _, files, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not files:
        raise OSError(errno.ECONNREFUSED, refusal)
    return files[0]


def _require_same_user(connection: socket.socket) -> None:
    _, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user != os.geteuid():
        raise OSError(errno.EPERM, f"the other process belongs to user {user}")


def why_none() -> str:
    """Return why processes on this machine cannot share a file, as far as one process can tell; empty if they can."""
    try:
        file = create(os.sysconf("SC_PAGE_SIZE"))
    except OSError as error:
        return f"processes cannot open memory that they share ({error})"
    try:
        with suppress(OSError):
            os.close(os.open(f"/proc/{os.getpid()}/fd/{file}", os.O_RDWR))
            return ""
        here, there = socket.socketpair()
        with here, there:
            socket.send_fds(here, [b"f"], [file])
            os.close(socket.recv_fds(there, 1, 1)[1][0])
    except OSError as error:
        return f"processes cannot open memory that they share ({error})"
    finally:
        os.close(file)
    return ""
