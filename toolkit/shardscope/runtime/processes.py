"""No process outlives what it belongs to: identities of processes, and ways to die together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_TRACKER = "multiprocessing.resource_tracker"

ProcessStart = str | float
"""When a process was started: with its pid this tells it from every other, ever. On Linux the boot and the clock ticks
since then, ``"BOOT/TICKS"``, which no change of the wall clock moves; elsewhere, and in files of older versions, unix
seconds."""


def process_started(pid: int | None = None) -> ProcessStart:
    """When a process was started; this one if `pid` is None.

    Raises:
        psutil.NoSuchProcess: There is none with this pid.
    """
    if sys.platform != "linux":
        return float(psutil.Process(pid).create_time())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{_stat(os.getpid() if pid is None else pid)[19]}"


def is_alive(pid: int, started: ProcessStart) -> bool:
    """Whether the process with this pid that was started then still runs."""
    try:
        if isinstance(started, str):
            is_same = process_started(pid) == started
        else:
            is_same = abs(psutil.Process(pid).create_time() - started) < 1.0
        return is_same and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _stat(pid: int) -> list[str]:
    """Fields 3 and following of ``/proc/PID/stat`` (proc(5)): the name before them may hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None


def is_of_shardscope(pid: int) -> bool:
    """Whether a process is an agent or a rank. A `status.json` from elsewhere may name any process of the user's."""
    try:
        return any("shardscope.runtime" in part for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def kill_descendants(pid: int) -> None:
    """SIGKILL everything below `pid`, but not `pid` itself.

    A resource tracker of the standard library is left to end by itself: it does once nobody is left to use it, and
    removes the semaphores of those that were killed.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(_TRACKER in argument for argument in child.cmdline()):
                    child.resume()
                else:
                    child.kill()


def ignore_interrupts() -> None:
    """Let Ctrl-C and Jupyter's interrupt, which reach the whole process group, mean the notebook's cell only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_with_parent() -> None:
    """Be killed by the system the moment the parent process is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def watch(wait: Callable[[], object], then: Callable[[], object]) -> None:
    """Call `then` on a thread of its own once `wait` returns."""

    def run() -> None:
        wait()
        then()

    threading.Thread(target=run, name="lifeline", daemon=True).start()


def exit_with_agent() -> None:
    """End this rank at once when the agent that started it is gone, on any system."""
    die_with_parent()
    agent = parent_process()
    if agent is not None:
        if os.getppid() == 1:  # the forkserver was gone before we asked
            os._exit(1)
        watch(agent.join, lambda: os._exit(1))
