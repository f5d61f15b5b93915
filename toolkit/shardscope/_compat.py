"""All uses of private APIs of the standard library; uses of private torch APIs are in `training/_compat.py`."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

PIPE_CLOSED = 255
"""Exit code that `multiprocessing` gives a process whose forkserver has closed its pipe without reporting one."""
_PATIENCE_S, _POLL_S = 1.0, 0.01
"""Time that a forkserver with closed pipes gets to exit, and the polling interval, in seconds."""


def started_processes() -> set[BaseProcess]:
    """Return the `multiprocessing` children of this process that have not been joined yet, without joining any.

    The public `active_children` joins the children that have ended, and a later `wait` then misses their exit codes.
    """
    return set(getattr(process, "_children", ()))


def known_exit_codes(processes: Iterable[BaseProcess]) -> dict[int, int | None]:
    """Return the exit code of each process by pid; None if the thread that waits for the process has not read it yet.

    The public `exitcode` would itself read the code from the forkserver's pipe, and the waiting thread would miss it.
    """
    return {
        each.pid: each._popen.returncode  # type: ignore[attr-defined]  # noqa: SLF001
        for each in processes
        if each.pid is not None
    }


def ended_forkserver() -> tuple[int, int] | None:
    """Return the pid and the exit code of this process's forkserver; None while it is running, or if there is none.

    The exit code of a killed forkserver is the negative signal number. The end of a forkserver is reported once.
    """
    pid = forkserver_pid()
    if pid is None:
        return None
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    # it has been waited for, and the standard library would fail if it waited once more
    forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]  # noqa: SLF001
    return pid, os.waitstatus_to_exitcode(status)


def forkserver_ended_with(exit_codes: Iterable[int]) -> tuple[int, int] | None:
    """Return the result of `ended_forkserver` after processes have ended.

    If their exit codes show that the forkserver is ending, wait until it has. A killed forkserver closes its pipes,
    so that its processes appear to have ended, before it can be reaped. Until then, the kernel frees its memory, which
    may take a long time on a loaded machine.

    Args:
        exit_codes: Exit codes of the processes.
    """
    deadline = time.monotonic() + _PATIENCE_S * (PIPE_CLOSED in exit_codes)
    while (ended := ended_forkserver()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return ended


def forkserver_pid() -> int | None:
    """Return the pid of this process's forkserver; None if there is none."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)  # noqa: SLF001
    return pid


def fork_forkserver(folder: Path) -> int | None:
    """Start the forkserver as a fork of this process, which takes a millisecond and keeps all imported modules.

    The standard library would start the forkserver as a fresh interpreter that imports every module again. Call this
    function before any thread is started.

    Args:
        folder: Folder for the forkserver's socket. It must be private to the user, because any process that can open
            the socket can run code.

    Returns:
        The forkserver's pid, or None if this Python version or platform has a different forkserver. The standard
        forkserver then starts on first use, which takes a second or two longer.
    """
    server = forkserver._forkserver  # noqa: SLF001
    fields = {"_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"}
    if sys.version_info >= (3, 14) or sys.platform != "linux" or not fields <= set(vars(server)):
        return None
    resource_tracker.ensure_running()
    # a socket's path is limited to about 100 characters, and the path of a run directory may be longer
    short = f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}"
    # if this forkserver is killed, multiprocessing puts the socket of its replacement here; the default would be a
    # temporary folder, which is not deleted when this process is killed
    process.current_process()._config["tempdir"] = short  # type: ignore[attr-defined]  # noqa: SLF001
    address = f"{short}/forkserver"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive_read, alive_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive_write)
        try:
            forkserver.main(listener.fileno(), alive_read, [])
        finally:
            os._exit(0)
    os.close(alive_read)
    listener.close()
    server._forkserver_address = address  # type: ignore[attr-defined]  # noqa: SLF001
    server._forkserver_alive_fd = alive_write  # type: ignore[attr-defined]  # noqa: SLF001
    server._forkserver_pid = pid  # type: ignore[attr-defined]  # noqa: SLF001
    return pid
