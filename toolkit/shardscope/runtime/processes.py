"""No process outlives what it belongs to: identities of processes, and ways to die together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import parent_process
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_TRACKER = "multiprocessing.resource_tracker"
_OF_A_RUN = ("shardscope.runtime", "multiprocessing.")
_POLL_S = 0.005
_LONGEST_POLL_S = 0.1
_DYING_S = 5.0
"""How long a killed process may take to disappear: the system frees its memory first."""

ProcessStart = str | float
"""When a process was started: with its pid this tells it from every other, ever. On Linux the boot and the clock ticks
since then, ``"BOOT/TICKS"``, which no change of the wall clock moves; elsewhere, and in files of older versions, unix
seconds."""


Identity = tuple[int, ProcessStart]
"""A process for ever: its pid and its start."""


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
        return _is_same(pid, started) and _runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def _is_same(pid: int, started: ProcessStart) -> bool:
    if isinstance(started, str):
        return process_started(pid) == started
    return abs(psutil.Process(pid).create_time() - started) < 1.0


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
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


def kill_descendants(pid: int) -> list[psutil.Process]:
    """SIGKILL everything below `pid`, but not `pid` itself. Returns what was killed.

    A resource tracker of the standard library is left to end by itself: it does once nobody is left to use it, and
    removes the semaphores of those that were killed.
    """
    try:
        return _kill(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _kill(processes: list[psutil.Process]) -> list[psutil.Process]:
    killed = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if any(_TRACKER in argument for argument in process.cmdline()):
                process.resume()
            else:
                process.kill()
                killed.append(process)
    return killed


def end_processes_of(agent: int) -> None:
    """Kill all processes of an agent's run except the agent, and wait until they are gone.

    A killed process lives until the system has ended it, below the agent or, where its parent went first, elsewhere.
    """
    killed: set[psutil.Process] = set()

    def are_gone() -> bool:
        nonlocal killed
        # again each time: one may have started another just before it was killed
        killed |= {*kill_descendants(agent), *_kill(_session_of(agent))}
        return not any(map(_runs, killed))

    _wait_until(are_gone, _DYING_S)


def end_run(agent: Identity, ranks: Iterable[Identity], patience_s: float) -> None:
    """Wait until an agent and its ranks are gone, and kill those that outlive it.

    A process is known by its pid and its start, so one that has been given the same pid since is left alone, as is
    every process that is not an agent or a rank. Programs that the user's code has started are left alone.

    Args:
        agent: The run's agent.
        ranks: Its ranks.
        patience_s: Seconds after which an agent that still runs is killed, with all processes below it.
    """
    deadline = time.monotonic() + patience_s
    killed: set[psutil.Process] = set()

    def are_gone() -> bool:
        nonlocal killed
        agents = _of_a_run([agent])
        if agents and time.monotonic() < deadline:
            return False
        for each in agents:
            killed |= {*kill_descendants(each.pid), *_kill(_session_of(each.pid))}
        killed |= {*_kill([*agents, *_of_a_run(ranks)])}
        return not any(map(_runs, killed))

    _wait_until(are_gone, patience_s + _DYING_S)


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline, pause = time.monotonic() + timeout_s, _POLL_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_S)


def _of_a_run(known: Iterable[Identity]) -> list[psutil.Process]:
    """Those of the processes that still run, and are an agent or a rank."""
    found = []
    for pid, started in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if pid in (0, 1, os.getpid()) or not is_alive(pid, started):
                continue
            if is_of_shardscope(pid) or _is_ending(process):
                found.append(process)
    return found


def _session_of(leader: int) -> list[psutil.Process]:
    """The processes of a run that are in its agent's session, without the agent."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if pid in (leader, os.getpid()) or os.getsid(pid) != leader:
                continue
            process = psutil.Process(pid)
            is_of_run = any(name in part for part in process.cmdline() for name in _OF_A_RUN)
            if is_of_run or _is_ending(process):
                found.append(process)
    return found


def _is_ending(process: psutil.Process) -> bool:
    """Whether the system is ending a process: it has freed its memory, and with it the command line."""
    try:
        return not process.cmdline()
    except psutil.AccessDenied:  # macOS, at that moment
        return True


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
