"""When `stop` returns, the run has ended and no process of it lives."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from torch import nn

import shardscope as ss
from conformance.runs import agent_pid, all_gone, endless_job, family, freeze, rank_pids, wait_for
from shardscope.runtime.record import run as runs_module
from shardscope.runtime.record.processes import process_started


def lives(pids: list[int]) -> list[int]:
    """Those of the processes that run at this moment."""
    return [pid for pid in pids if not all_gone([pid], timeout=0.0)]


def agent_and_ranks(run: ss.Run) -> list[int]:
    ranks = rank_pids(run).values()  # before they have started, the process on record is the launch server
    return [*ranks, agent_pid(run)]


class Deaf(nn.Module):
    """A model whose ranks ignore SIGTERM, hold a quarter of a gigabyte, and take a minute for a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(64, 10)
        self.held = bytearray(b"1") * 2**28

    def forward(self, x: Any) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(60)
        return self.weights(x)


def test_a_rank_that_ignores_sigterm_in_a_long_step_is_gone() -> None:
    run = ss.launch(endless_job(model=Deaf), preflight=False)
    wait_for(lambda: "deaf" in run.logs(0) and "deaf" in run.logs(1), run)
    helpers, processes = family(run), [agent_pid(run), *(event["pid"] for event in run.events("process"))]
    run.stop(grace_s=0.1)
    assert lives(processes) == []
    assert all_gone(helpers)  # the forkserver and the resource tracker see that the agent is gone, and end
    assert (run.state, run.cause) == ("stopped", "requested")


def test_its_ranks_are_gone_when_a_run_says_that_it_has_ended() -> None:
    run = ss.launch(endless_job(model=Deaf), preflight=False)
    wait_for(lambda: "deaf" in run.logs(0) and "deaf" in run.logs(1), run)
    ranks = [event["pid"] for event in run.events("process")]
    run._dir.request_stop(0.1)
    while run.is_alive:
        pass
    assert lives(ranks) == []


def test_a_run_that_has_just_completed_is_gone() -> None:
    run = ss.launch(endless_job().replace(steps=20))
    processes = agent_and_ranks(run)
    run.wait(60).stop()
    assert lives(processes) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the forkserver is another process")
def test_ranks_that_outlive_their_agent_are_gone() -> None:
    """Frozen, they see neither that their agent has been killed nor that their forkserver has."""
    run = ss.launch(endless_job())
    ranks, agent = [*rank_pids(run).values()], agent_pid(run)
    forkserver = psutil.Process(ranks[0]).parent()
    assert forkserver is not None
    frozen = (*ranks, forkserver.pid)
    try:
        freeze(frozen)
        os.kill(agent, signal.SIGKILL)
        wait_for(lambda: not run.is_alive)
        assert lives(ranks) == ranks
        run.stop()
        assert lives(ranks) == []
    finally:
        for pid in lives(list(frozen)):
            os.kill(pid, signal.SIGKILL)
    assert (run.state, run.cause) == ("failed", "killed")


@pytest.mark.slow
def test_a_run_whose_agent_had_to_be_killed_was_stopped_and_did_not_fail() -> None:
    run = ss.launch(endless_job())
    processes = agent_and_ranks(run)
    freeze([agent_pid(run)])
    run.stop(grace_s=0.1)
    assert lives(processes) == []
    assert (run.state, run.cause, run.error) == ("stopped", "requested", None)


def test_an_agent_that_still_writes_a_checkpoint_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "_KILL_AFTER_S", 1.0)
    run = ss.launch(endless_job())
    *_, agent = agent_and_ranks(run)
    freeze([agent])
    folder = run.path / "checkpoints" / "step-4.partial"
    folder.mkdir()

    def write() -> None:
        """For longer than the agent may take otherwise."""
        wake_at = time.monotonic() + 3.0
        with (folder / "rank-0.bin").open("wb", buffering=0) as file:
            while run.is_alive and not all_gone([agent], timeout=0.0):
                file.write(b"1")
                time.sleep(0.05)
                if time.monotonic() > wake_at:  # once: it may end, and be reaped, at any time
                    os.kill(agent, signal.SIGCONT)
                    wake_at = math.inf

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        run.stop(grace_s=0.0)
        writing.result()
    status = run._dir.read_status()
    assert status is not None
    assert status.state == "stopped", "written by the agent, which was not killed"
    assert run.reason


def test_processes_of_others_in_what_was_an_agents_session_are_left_alone() -> None:
    """A pid is given again: to the leader of another session, which may have ended and left workers in it."""
    worker = "import time; time.sleep(600)  # multiprocessing.spawn shardscope.runtime"
    leader = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {worker!r}]).pid, flush=True)"
    )
    shell = subprocess.Popen(
        [sys.executable, "-c", leader], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert shell.stdout is not None
    others = int(shell.stdout.readline())
    shell.wait()
    try:
        run = ss.launch(endless_job().replace(steps=2)).wait(60)
        boot, _, ticks = str(process_started()).partition("/")
        for started in ("another-boot/4711", f"{boot}/{int(ticks) - 100}"):
            run._dir.write_status("failed", pid=shell.pid, process_started=started)
            ss.Run.attach(run.path).stop()
            assert lives([others]) == [others]
    finally:
        os.kill(others, signal.SIGKILL)


def test_stop_leaves_processes_alone_that_only_a_status_names() -> None:
    """The process that reads, and one of the user's."""
    run = ss.launch(endless_job().replace(steps=2)).wait(60)
    other = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        for pid in (os.getpid(), other.pid):
            run._dir.write_status("stopped", pid=pid, process_started=process_started(pid))
            asked = time.monotonic()
            ss.Run.attach(run.path).stop()
            assert time.monotonic() - asked < 60.0  # it does not wait for the other process to end
        assert lives([other.pid]) == [other.pid]
    finally:
        other.kill()
        other.wait()
