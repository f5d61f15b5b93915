"""A process is told from every other by what no clock changes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import shardscope as ss
from conformance.runs import agent_pid, all_gone, endless_job, rank_pids
from shardscope.runtime.record.processes import is_alive, process_started, remove_gpu_files

HOUR_S = 3600.0


@pytest.fixture
def step_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the wall clock, as far as this process can see: where the system counts from, every start time moves."""
    truth = psutil.Process.create_time

    def step(seconds: float) -> None:
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: truth(process) + seconds)

    return step


@pytest.mark.sampled
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere start times are kept, not computed")
@pytest.mark.parametrize("seconds", [-HOUR_S, -1.0, 1.0, HOUR_S])
def test_a_clock_step_ends_no_run(step_clock: Callable[[float], None], seconds: float) -> None:
    run = ss.launch(endless_job())
    pids = rank_pids(run)
    step_clock(seconds)
    seen = ss.Run.attach(run.path)
    assert seen.state == "running"
    assert seen.stop().state == "stopped"
    assert all_gone([*pids.values()], timeout=0.0)  # one whose parent has not waited for it yet has ended


def test_a_process_is_told_from_one_that_had_its_number_before() -> None:
    mine = process_started()
    assert is_alive(os.getpid(), mine)
    assert not is_alive(os.getpid(), process_started(1))
    assert not is_alive(1, mine)


def test_a_process_that_ended_is_not_alive_though_nobody_has_waited_for_it() -> None:
    child = subprocess.Popen(["true"])
    started = process_started(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid, started)
    child.wait()
    assert not is_alive(child.pid, started)


def test_a_run_file_of_an_older_version_still_tells_whether_its_agent_lives() -> None:
    run = ss.launch(endless_job())
    rank_pids(run)
    agent = psutil.Process(agent_pid(run))
    older = run._dir.read_json("status.json") | {"process_started": agent.create_time()}
    run._dir.write_json("status.json", older)
    assert ss.Run.attach(run.path).state == "running"
    run._dir.write_json("status.json", older | {"process_started": agent.create_time() - HOUR_S})
    assert ss.Run.attach(run.path).state == "failed"
    run._dir.write_json("status.json", older)
    assert run.stop().state == "stopped"


def test_files_that_killed_ranks_shared_gpu_memory_through_are_removed(tmp_path: Path) -> None:
    own, other, before = 0x108C, 0x108D, "cuda.shm.0.108c.7"
    names = [f"cuda.shm.0.{own:x}.1", f"cuda.shm.0.{own:x}.2", f"torch_{own}_123_0", before]
    kept = {f"cuda.shm.0.{other:x}.1", f"torch_{other}_123_0", "sem.mp-1", before}
    for name in {*names, *kept}:
        (tmp_path / name).touch()
    os.utime(tmp_path / before, (1.0, 1.0))  # of an earlier process with the same pid
    remove_gpu_files([own], since=time.time() - 60, folder=tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == kept
