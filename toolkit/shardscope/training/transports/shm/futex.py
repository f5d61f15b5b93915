"""Sleeping and waking across processes: the Linux futex, on 32-bit words in memory that the processes share.

A waiter reads a word, checks the condition that it waits for, and sleeps if the word still has the value that it read.
A process that changes the condition then changes the word and wakes the waiters. As the kernel compares the word and
puts the waiter to sleep in one step, no wake-up is lost.

The calls go through `ctypes`, which releases the interpreter's lock while they run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

from shardscope.machine import FUTEX_CALLS

_WAIT, _WAKE, _PRIVATE = 0, 1, 128
_EVERY_WAITER = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NUMBER = ctypes.c_long(FUTEX_CALLS.get(platform.machine(), 0))
_call = ctypes.CDLL(None, use_errno=True).syscall
_call.restype = ctypes.c_long
_call.argtypes = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32,
)  # fmt: skip


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the word at `address` equals `value`, until woken, for at most `seconds`.

    It may return early, so the caller must check its condition again.
    """
    whole = int(seconds)
    timeout = _Timespec(whole, int((seconds - whole) * 1e9))
    if _call(_NUMBER, address, _WAIT, value, ctypes.addressof(timeout), None, 0) == -1:
        error = ctypes.get_errno()
        if error not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(error, os.strerror(error))


def wake(address: int) -> None:
    """Wake all processes and threads that sleep on the word at `address`. It is also a full memory barrier."""
    _call(_NUMBER, address, _WAKE, _EVERY_WAITER, None, None, 0)


_unused = ctypes.c_uint32()
_UNUSED = ctypes.addressof(_unused)


def fence() -> None:
    """Order all earlier reads and writes of this thread before all later ones, on every processor.

    Waking a word on which nobody sleeps does this: the kernel executes a full barrier before it looks for waiters.
    """
    _call(_NUMBER, _UNUSED, _WAKE | _PRIVATE, 1, None, None, 0)


def order_copies() -> None:
    """Order copies of data and the words that announce them, between ranks.

    Call it after writing data and before the word that announces it, and after reading the word and before the data.
    x86 keeps that order by itself; other processors, such as ARM, need a barrier.
    """
    if not _KEEPS_ORDER:
        fence()


_KEEPS_ORDER = platform.machine() == "x86_64"
