"""A killed forkserver is noticed, although it seems to be running for a while after its ranks have lost it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conformance.runs import small_job
from shardscope import _compat
from shardscope.runtime.agent.agent import Agent
from shardscope.runtime.agent.failure import Ending
from shardscope.runtime.record.rundir import RunDir
from shardscope.runtime.record.status import Cause

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("exit_codes", [[255], [-9, 255, 1]])
def test_it_is_waited_for_if_a_process_has_lost_its_pipe(
    monkeypatch: pytest.MonkeyPatch, exit_codes: list[int]
) -> None:
    looks = iter([None, None, (7, -9)])
    monkeypatch.setattr(_compat, "ended_forkserver", lambda: next(looks))
    assert _compat.forkserver_ended_with(exit_codes) == (7, -9)


def test_other_exit_codes_cost_no_wait_and_a_running_one_costs_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_compat, "ended_forkserver", lambda: None)
    began = time.monotonic()
    assert _compat.forkserver_ended_with([1, -15, 0]) is None
    assert time.monotonic() - began < _compat._PATIENCE_S
    assert _compat.forkserver_ended_with([255]) is None
    assert time.monotonic() - began >= _compat._PATIENCE_S


def test_its_end_is_reported_once_and_another_can_be_started(tmp_path: Path) -> None:
    code = f"""
import os, time
from multiprocessing import get_context
from pathlib import Path
from shardscope import _compat
pid = _compat.fork_forkserver(Path({str(tmp_path)!r}))
if pid is None:  # another kind of forkserver in this version of Python
    get_context("forkserver").Process(target=print).start()
    pid = _compat.forkserver_pid()
assert _compat.ended_forkserver() is None
os.kill(pid, {int(signal.SIGKILL)})
assert _compat.forkserver_ended_with([255]) == (pid, -{int(signal.SIGKILL)})
assert _compat.ended_forkserver() is None
os.environ.pop("PYTHONPATH", None)
process = get_context("forkserver").Process(target=print, args=("started",))  # by the standard library's own
process.start()
process.join()
assert process.exitcode == 0
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert told.returncode == 0, told.stderr
    assert "started" in told.stdout


LATE = """
from shardscope import _compat
ended, looks = _compat.ended_forkserver, []
def late():
    looks.append(None)
    return ended() if len(looks) > 3 else None
_compat.ended_forkserver = late
"""
LAUNCH = """
import sys, time
import psutil
import shardscope as ss
job = ss.Job(
    model="mlp", data="digits", strategy="ring", world_size=3, steps=100_000, batch=48, elastic="2:3", recovery=1
)
run = ss.launch(job, root=sys.argv[1], preflight=False)
while run.reduced().last_step < 3:
    time.sleep(0.01)
agent = psutil.Process(run._dir.read_status().pid)
next(child for child in agent.children() if len(child.children()) >= 3).kill()
while not (run.reduced().restarts and run.reduced().restarts[0].recovered_t) and run.is_alive:
    time.sleep(0.01)
(event,) = run.events("restart")
print(event["cause"], "|", event["world_size"], "|", round(run.reduced().restarts[0].took_s, 2))
run.stop(1)
"""


@pytest.mark.slow
def test_an_elastic_run_keeps_its_ranks_if_the_notice_comes_late(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    told = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(tmp_path / "runs")], capture_output=True, text=True, timeout=100,
        check=False, env=environment,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    cause, size, _ = told.stdout.split(" | ")
    assert "the forkserver of run" in cause
    assert "was killed by SIGKILL" in cause
    assert size == "3"


class _Refusing(Agent):
    """An agent whose ranks always fail, whose status cannot be written and whose forkserver cannot be started."""

    def _attempt(self, job: Any, source: Any) -> Ending:
        return Ending("failed", error={"message": "rank 1 was killed", "rank": 1})

    def _clear_away(self) -> None:
        pass

    def _renew(self, _source: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_an_agent_that_cannot_start_another_ends_the_run_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write_status(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = RunDir.create(small_job(recovery=1), tmp_path)
    monkeypatch.setattr(RunDir, "write_status", write_status)
    read, write = os.pipe()
    agent = _Refusing(run, read, {"detach": False, "resume": None, "command": []})
    ending = agent._run_ranks()
    for each in (read, write, agent._folder):
        os.close(each)
    assert (ending.state, ending.cause) == ("failed", Cause.NOT_STARTED)
    assert ending.error is not None
    assert ending.error["message"].startswith("the ranks could not be started again: ")
    assert os.strerror(errno.EMFILE) in ending.error["message"]
