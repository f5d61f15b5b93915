"""Process identities, and ways to end groups of processes, so that no process outlives the run to which it belongs."""

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

from shardscope.runlog.clock import boot_id

_PR_SET_PDEATHSIG = 1
_TRACKER = "multiprocessing.resource_tracker"
_OF_A_RUN = ("shardscope.runtime", "multiprocessing.")
_POLL_S = 0.001
_LONGEST_POLL_S = 0.1
_DYING_S = 5.0
"""Time that a killed process may take to disappear, in seconds: the system frees its memory first."""

ProcessStart = str | float
"""Start time of a process, which together with its pid identifies the process uniquely. On Linux it consists of the
boot id and the clock ticks since boot, ``"BOOT/TICKS"``, which do not depend on the wall clock. On other systems, and
in files from older versions, it is in Unix seconds."""


Identity = tuple[int, ProcessStart]
"""Pid and start time, which together identify a process uniquely."""


def process_started(pid: int | None = None) -> ProcessStart:
    """Return the start time of a process; of this process if `pid` is None.

    Raises:
        psutil.NoSuchProcess: No process has this pid.
    """
    if sys.platform != "linux":
        return float(psutil.Process(pid).create_time())
    return f"{boot_id()}/{_stat(os.getpid() if pid is None else pid)[19]}"


def is_alive(pid: int, started: ProcessStart) -> bool:
    """Return whether the process with this pid and start time is still running."""
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
    """Return the fields of ``/proc/PID/stat`` (proc(5)) after the process name, which may contain any character."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None


def is_of_shardscope(pid: int) -> bool:
    """Return whether a process is an agent or a rank. An untrusted `status.json` may name any process of the user."""
    try:
        return any("shardscope.runtime" in part for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def kill_descendants(pid: int) -> list[psutil.Process]:
    """Send SIGKILL to all descendants of `pid`, but not to `pid` itself. Return the processes killed.

    Resource trackers of the standard library are not killed: each ends by itself when no process uses it any more, and
    removes the semaphores of the killed processes.
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
    """Kill all processes of an agent's run except the agent, and wait until they have disappeared.

    A killed process exists until the system has freed its resources. In the meantime it stops being a descendant of
    the agent if its parent ends first, so all killed processes are recorded.
    """
    killed: set[psutil.Process] = set()

    def are_gone() -> bool:
        nonlocal killed
        # repeated each time: a process may have started another one just before it was killed
        killed |= {*kill_descendants(agent), *_kill(_session_of(agent))}
        return not any(map(_runs, killed))

    _wait_until(are_gone, _DYING_S)


def end_ranks_of(agent: int, spared: set[int]) -> set[psutil.Process]:
    """Kill the remaining ranks of an agent that keeps running, and all their child processes; wait until they end.

    Args:
        agent: Pid of the agent.
        spared: Pids of the agent's helpers, such as its forkserver; child processes of these are not spared.

    Returns:
        The killed processes.
    """
    killed: set[psutil.Process] = set()

    def are_gone() -> bool:
        nonlocal killed
        left = [*psutil.Process(agent).children(recursive=True), *_session_of(agent)]
        killed |= {*_kill([process for process in left if process.pid not in spared])}
        return not any(map(_runs, killed))

    _wait_until(are_gone, _DYING_S)
    return killed


def remove_gpu_files(pids: Iterable[int], since: float, folder: Path = Path("/dev/shm")) -> None:  # noqa: S108
    """Remove the files through which ended processes shared GPU memory.

    A killed process leaves files of the CUDA driver, whose names contain the pid in hexadecimal, and files of PyTorch,
    whose names contain the pid in decimal.

    Args:
        pids: The processes.
        since: Start of the first process, in Unix seconds; older files belong to earlier processes with the same pid.
        folder: Folder of the files.
    """
    for pid in pids:
        for pattern in (f"cuda.shm.*.{pid:x}.*", f"torch_{pid}_*"):
            for file in folder.glob(pattern):
                with contextlib.suppress(OSError):
                    found = file.stat()
                    if found.st_uid == os.getuid() and found.st_mtime >= since:
                        file.unlink()


def end_run(agent: Identity, ranks: Iterable[Identity], patience_s: float) -> None:
    """Wait until an agent and its ranks have ended, and kill those that outlive `patience_s`.

    A process is identified by its pid and its start time, so a process that later got the same pid is not killed.
    Processes that are neither an agent nor a rank, such as programs that the user's code has started, are not killed
    either.

    Args:
        agent: The run's agent.
        ranks: The ranks of the run.
        patience_s: Time in seconds after which an agent that is still running is killed, with all its descendants.
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
    """Return the processes in `known` that are still running and are an agent or a rank."""
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
    """Return the processes of a run in its agent's session, except the agent."""
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
    """Return whether the system is ending a process: its command line is empty, because its memory has been freed."""
    try:
        return not process.cmdline()
    except psutil.AccessDenied:  # raised by macOS at that moment
        return True


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``; ``signal 40`` for a real-time signal, which has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ignore_interrupts() -> None:
    """Ignore Ctrl-C and Jupyter's interrupt, which reach the whole process group but are meant for the cell only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_with_parent() -> None:
    """Make the system kill this process as soon as its parent process has ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def watch(wait: Callable[[], object], then: Callable[[], object]) -> None:
    """Call `wait` on a new thread, and call `then` after it returns."""

    def run() -> None:
        wait()
        then()

    threading.Thread(target=run, name="lifeline", daemon=True).start()


def exit_with_agent() -> None:
    """End this rank immediately when the agent that started it has ended, on any system."""
    die_with_parent()
    agent = parent_process()
    if agent is not None:
        if os.getppid() == 1:  # the forkserver ended before prctl was called
            os._exit(1)
        watch(agent.join, lambda: os._exit(1))
