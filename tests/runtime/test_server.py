"""The launch server, when the agent of a run cannot start: the run fails, and the server goes on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import shardscope as ss
from shardscope.runtime.agent import agent
from shardscope.runtime.launcher.server import Server
from shardscope.runtime.record.processes import process_started
from shardscope.runtime.record.rundir import RunDir
from shardscope.runtime.record.status import Cause, Status


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The directory of a run that this process, in place of a launch server, is to start."""
    directory = RunDir.create(ss.Job(model="mlp", data="digits"), tmp_path)
    directory.write_status("starting", pid=os.getpid(), process_started=process_started())
    return directory


def refuses() -> int:
    """Stand in for `os.fork` where no process can be created."""
    raise BlockingIOError(11, "Resource temporarily unavailable")


def launched(run: RunDir, *imports: str) -> Status:
    """The status of the run once a server has been asked to start it."""
    server = Server(lambda: True)
    server._launch({"run": str(run.path), "imports": imports, "detach": False})
    deadline = time.monotonic() + 20

    def wait_for_own(_: int, options: int) -> tuple[int, int]:
        """Leave the other children of this process, such as ranks of other tests, to those who wait for them."""
        found = (waitpid(pid, options) for pid in server.lifelines)
        return next((one for one in found if one[0]), (0, 0))

    waitpid = os.waitpid
    with patch("os.waitpid", wait_for_own):
        while server.lifelines and time.monotonic() < deadline:
            server._reap()
            time.sleep(0.01)
    assert not (server.lifelines or server.runs)
    status = run.read_status()
    assert status is not None
    return status


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        pytest.param(
            lambda: os.kill(os.getpid(), 40),
            "was killed by signal 40",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="a real-time signal"),
        ),
        (lambda: os._exit(3), "ended with exit code 3"),
    ],
)
def test_an_agent_that_ends_before_it_writes_a_status_is_reported(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, ends: Any, told: str
) -> None:
    monkeypatch.setattr(agent, "main", lambda *_: ends())
    status = launched(run)
    assert (status.state, status.cause) == ("failed", Cause.NOT_STARTED)
    assert status.error is not None
    assert status.error["message"] == f"the agent {told} before the ranks were started"


@pytest.mark.timeout(30)
def test_a_status_of_the_agent_is_kept(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*_: object) -> int:
        run.write_status(
            "stopped", pid=os.getpid(), process_started=process_started(), reason="asked to stop"
        )
        return 0

    monkeypatch.setattr(agent, "main", stops)
    assert launched(run).state == "stopped"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("raises", ["raise RuntimeError('no licence')", "import sys; sys.exit('no licence')"])
def test_a_module_that_cannot_be_imported_fails_only_its_run(
    run: RunDir, tmp_path: Path, raises: str
) -> None:
    (tmp_path / "broken_plug_in.py").write_text(raises)
    sys.path.insert(0, str(tmp_path))
    try:
        status = launched(run, "broken_plug_in")
    finally:
        sys.path.remove(str(tmp_path))
    assert (status.state, status.cause) == ("failed", Cause.NOT_STARTED)
    assert status.error is not None
    assert status.error["message"] == "the agent could not start: no licence"


@pytest.mark.timeout(30)
def test_a_process_that_cannot_be_created_fails_only_its_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", refuses)
    status = launched(run)
    assert status.error is not None
    assert "Resource temporarily unavailable" in status.error["message"]


@pytest.mark.slow
@pytest.mark.timeout(30)
def test_a_trace_for_which_no_process_can_be_created_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", refuses)
    Server(lambda: True)._fork_trace({"trace": {}, "answer": str(tmp_path / "answer.json")})
    assert "Resource temporarily unavailable" in (tmp_path / "answer.json").read_text()
