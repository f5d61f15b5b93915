"""Runs for tests: small jobs, and a look at what they leave behind."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn

import shardscope as ss

SHORT_TEXT = argparse.__file__
"""A text of 100 kB for language models: their last evaluation is of a tenth of it, at most 512 rows."""


def small_job(**changes: Any) -> ss.Job:
    """A job that is over in a second."""
    fields: dict[str, Any] = {
        "model": "mlp",
        "data": "digits",
        "strategy": "ring",
        "world_size": 2,
        "steps": 10,
    }
    return ss.Job(**{**fields, **changes})


def acting_module(act: Callable[[], None]) -> nn.Module:
    """A classifier of digits that acts in its third forward pass."""

    class Acts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(64, 10), 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            if self.calls == 3:
                act()
            return self.layer(x.flatten(1))

    return Acts()


def endless_job(**changes: Any) -> ss.Job:
    """A job that goes on until it is stopped."""
    return small_job(steps=1_000_000, **changes)


def losses(run: ss.Run) -> list[float]:
    """Loss of each step of a run."""
    found: list[float] = run.metrics()["loss"].tolist()
    return found


def rank_pids(run: ss.Run, at_least: int | None = None) -> dict[int, int]:
    """Process of each rank, once all have taken a step."""
    wait_for(lambda: len({e["rank"] for e in run.events("step")}) >= (at_least or run.job.world_size), run)
    return {event["rank"]: event["pid"] for event in run.events("start")}


def wait_for_steps(root: Path) -> None:
    """Wait until rank 0 of a run below this folder has taken a step."""
    wait_for(lambda: any('"step"' in path.read_text() for path in root.rglob("rank-0.jsonl")))


def wait_for(condition: Callable[[], Any], run: ss.Run | None = None, timeout: float = 120.0) -> None:
    """Wait until `condition` holds; fail with the run's own words if it does not."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline or (run is not None and not run.is_alive and not condition()):
            pytest.fail(f"waited in vain; {run!r}: {run.error if run else ''}\n{run.logs() if run else ''}")
        time.sleep(0.02)


def agent_pid(run: ss.Run) -> int:
    """The process that looks after the run."""
    status = run._dir.read_status()
    assert status is not None
    return status.pid


def all_gone(pids: list[int], timeout: float = 120.0) -> bool:
    """Whether none of these processes runs any more."""
    deadline = time.monotonic() + timeout
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def freeze(pids: Sequence[int]) -> None:
    """Stop processes where they are; `kill` only asks for it, and a thread may run a little longer."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))


def end_all(root: Path) -> None:
    """End the runs in a folder, and the programs that this process has started and that launch theirs there."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            is_program = "multiprocessing" not in " ".join(child.cmdline())  # the ranks of a pool go on
            if is_program and child.environ().get("SHARDSCOPE_RUNS") == str(root):
                child.kill()
    for run in ss.runs(root, all=True):
        with contextlib.suppress(ss.ShardscopeError):
            run.stop(grace_s=0.0)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(run: ss.Run) -> list[int]:
    """The agent and everything below it."""
    agent = agent_pid(run)
    return [agent, *(child.pid for child in psutil.Process(agent).children(recursive=True))]


def semaphores(pid: int) -> set[Path]:
    """The named semaphores that a process holds, as files; they outlive it unless somebody removes them."""
    mapped = {line.split()[4] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return {path for path in Path("/dev/shm").glob("sem.*") if _inode(path) in mapped}


def _inode(path: Path) -> str | None:
    """Number of a file as a process's maps name it; None if its owner, perhaps of another test, has removed it."""
    try:
        return str(path.stat().st_ino)
    except FileNotFoundError:
        return None


def open_files(pid: int | None = None) -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid or os.getpid()}/fd"))
