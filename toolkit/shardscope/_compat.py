"""Private surfaces of the standard library, in one place; those of torch are in `training/_compat.py`."""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path


def started_processes() -> set[BaseProcess]:
    """The `multiprocessing` children of this process that nobody has joined yet, without joining any.

    The public `active_children` joins those that have ended, which would take their exit codes from whoever waits.
    """
    return set(getattr(process, "_children", ()))


def ended_forkserver() -> tuple[int, int] | None:
    """Process and exit code (minus the signal) of this process's forkserver if it has ended; None while it lives."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # noqa: SLF001
    if pid is None:
        return None
    ended, status = os.waitpid(pid, os.WNOHANG)
    return (pid, os.waitstatus_to_exitcode(status)) if ended else None


def fork_forkserver(folder: Path) -> int | None:
    """Give this process a forkserver that is forked from it, with everything it has imported, in a millisecond.

    The standard library starts the forkserver as a fresh interpreter that imports everything anew. Call this before
    any thread is started.

    Args:
        folder: Where its socket goes; must be private to the user, for whoever reaches the socket can run code.

    Returns:
        The forkserver's pid, or None where this Python's forkserver has another shape; the standard one then starts
        on first use, a second or two slower.
    """
    server = forkserver._forkserver  # noqa: SLF001
    fields = {"_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"}
    if sys.version_info >= (3, 14) or sys.platform != "linux" or not fields <= set(vars(server)):
        return None
    resource_tracker.ensure_running()
    # a socket's path is limited to about 100 characters, a run directory's is not
    short = f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}"
    # where the socket of another would go, should this one be killed; by default a folder that a kill leaves behind
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
