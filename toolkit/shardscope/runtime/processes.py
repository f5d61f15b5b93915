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

import psutil

_PR_SET_PDEATHSIG = 1


def process_started(pid: int | None = None) -> float:
    """When a process was started, in unix seconds; with its pid this tells it from every other, ever."""
    return float(psutil.Process(pid).create_time())


def is_alive(pid: int, started: float) -> bool:
    """Whether the process with this pid that was started then still runs."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_descendants(pid: int) -> None:
    """SIGKILL everything below `pid`, but not `pid` itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
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
