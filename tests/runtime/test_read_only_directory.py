"""A run whose directory can no longer be written ends in one sentence, whenever that happens."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from conformance.runs import all_gone, family, rank_pids, small_job
from shardscope.runlog.files import overwrite
from shardscope.runtime.launcher import driver
from shardscope.runtime.record import rundir
from shardscope.runtime.record.rundir import RunDir


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Let nobody write to a run directory, not even root, whom permissions do not stop."""
    folders = [path, *(each for each in path.iterdir() if each.is_dir())]
    is_root = os.getuid() == 0
    if is_root and subprocess.run(["chattr", "+i", *folders], check=False, capture_output=True).returncode:
        pytest.skip("root can write everywhere on this file system")
    for folder in folders:
        if not is_root:
            folder.chmod(0o500)
    try:
        yield
    finally:
        if is_root:
            subprocess.run(["chattr", "-i", *folders], check=True)
        for folder in folders:
            folder.chmod(0o700)


def test_a_directory_that_becomes_read_only_before_the_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_hand_over", lambda *_: None)  # the server has not taken the request yet
    run = ss.launch(small_job())
    assert run.state == "starting"
    with read_only(run.path):
        with pytest.raises(
            ss.RunFailed, match=r"could not be started: its directory .* make it writable, or"
        ):
            run.wait(30)
        assert run.stop().cause == "not-started"


def test_an_agent_that_cannot_write_that_it_has_started_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ss.launch(small_job(steps=2)).wait(60)
    server, request = driver.driver, driver.driver.request
    with ExitStack() as stack:

        def too_late(handle: Any, line: bytes) -> bool:
            stack.enter_context(read_only(Path(json.loads(line)["run"])))
            return request(handle, line)

        monkeypatch.setattr(server, "request", too_late)
        run = ss.launch(small_job(steps=1_000_000))
        monkeypatch.setattr(server, "request", request)
        with pytest.raises(ss.RunFailed, match="could not be started"):
            run.wait(30)
        ss.launch(small_job(steps=2)).wait(60)  # the server takes one request after the other
        assert run.events() == []


@pytest.mark.slow
def test_a_run_that_cannot_write_how_it_ended_was_not_killed() -> None:
    run = ss.launch(small_job(steps=400))
    rank_pids(run)
    processes = family(run)
    with read_only(run.path):
        assert run.wait(60).state == "completed", "as its ranks say"
        assert all_gone(processes)
    run = ss.launch(small_job(steps=1_000_000, checkpoint=100))
    rank_pids(run)
    with (
        read_only(run.path),
        pytest.raises(ss.RunFailed, match=r"CheckpointError: .* make the folder writable"),
    ):
        run.wait(60)


def test_a_launch_whose_directory_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(driver, "_hand_over", refuse)
    with pytest.raises(
        ss.errors.LaunchError, match=r"cannot write the run directory .*: Read-only file system; set"
    ):
        ss.launch(small_job())


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/usr/bin/python"),
        OSError("no address"),
    ],
)
def test_other_errors_of_a_launch_do_not_accuse_the_directory(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(driver.driver, "server", refuse)
    with pytest.raises(type(error)) as raised:
        ss.launch(small_job(), preflight=False)
    assert raised.value is error


def test_how_a_run_ended_does_not_depend_on_who_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who may not write there, as in a sandbox, does not conclude that the agent could not either."""
    run = ss.launch(small_job(steps=1_000_000))
    rank_pids(run)
    status = json.loads((run.path / "status.json").read_text())
    monkeypatch.setattr(RunDir, "is_read_only", lambda _: True)
    (run.path / "status.json").write_text(json.dumps({**status, "state": "starting", "restarts": 2}))
    assert ss.Run.attach(run.path).state == "starting"
    (run.path / "status.json").write_text(json.dumps({**status, "restarts": 2}))
    os.kill(status["pid"], signal.SIGKILL)
    with pytest.raises(ss.RunFailed, match=r"was killed before the run ended, or could not write how: /"):
        run.wait(60)
    assert (run.cause, run.restarts) == ("killed", 2)


def test_how_a_run_ended_is_written_on_a_disk_that_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may use the space that the reserve has made, as soon as it is there."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = RunDir.create(small_job(), tmp_path)
    monkeypatch.setattr(rundir, "replace_whole", full)
    for message, kept in (("why", r"why"), ("missing ä" * 1000, r"(missing ä)+m?i?s?s?i?n?g? ?\.\.\.")):
        error = {"message": message, "traceback": "x" * 10_000}
        run.write_status("failed", pid=1, process_started=0.0, error=error)
        status = run.read_status()
        assert status is not None
        assert status.state == "failed"
        assert status.error is not None
        assert status.error["traceback"] == ""
        assert re.fullmatch(kept, status.error["message"])
        assert (run.path / "status.json").stat().st_size <= 4096


def test_a_status_that_does_not_fit_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, where a file gets no other block."""
    pwrite, file = os.pwrite, tmp_path / "status.json"
    file.write_bytes(b"former")
    monkeypatch.setattr(os, "pwrite", lambda where, what, at: pwrite(where, what[: 10 - at], at))
    overwrite(file, b"new")
    assert file.read_bytes() == b"new"
    with pytest.raises(OSError, match="No space left"):
        overwrite(file, b"a longer one")
    assert file.read_bytes() == b"new"
