"""What a study makes of a run's ending: read from the kind that the run directory records, never from its words."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardscope as ss
from conformance.runs import small_job, wait_for
from conformance.studies import JOB, LONG
from shardscope.runtime.record.processes import process_started
from shardscope.runtime.record.rundir import RunDir
from shardscope.tuning import recovery
from shardscope.tuning.driver import was_killed
from shardscope.tuning.session import StudySession


def test_an_error_that_speaks_of_killing_fails_the_trial_at_once() -> None:
    job = JOB.replace(model=speaks_of_killing, data="digits")
    ss.tune(job, {"optimizer.lr": [1e-3]}, trials=1, objectives=["loss"], name="words")
    records = StudySession.open(job, {"optimizer.lr": [1e-3]}, objectives=["loss"], name="words").records()
    assert [(r.state, r.counted) for r in records] == [("failed", True)]
    assert "the loader was killed by SIGKILL" in str(records[0].reason)


def speaks_of_killing() -> Any:
    raise ValueError("the loader was killed by SIGKILL and could not be started again")


def test_a_run_that_somebody_stops_is_a_pruned_trial() -> None:
    session = StudySession.open(LONG, {"optimizer.lr": [1e-3]}, trials=1, name="by-hand", baselines=False)
    wait_for(lambda: session.driver.tick() and session.driver.live)
    run = ss.Run.attach(session.driver.live[0].run.path)
    wait_for(lambda: run.events("step"), run)
    run.stop()
    assert run.cause == "requested"
    session.run()
    assert [(r.state, r.reason) for r in session.records()] == [("pruned", "its run was stopped by hand")]


def told(tmp_path: Path, **fields: Any) -> ss.Run:
    """A run whose `status.json` says this of its end."""
    directory = RunDir.create(small_job(), tmp_path)
    status = {"state": "failed", "pid": 1, "process_started": process_started(1), "t": 1.0, **fields}
    directory.write_json("status.json", status)
    return ss.Run.attach(directory.path)


@pytest.mark.parametrize("cause", [None, "abducted by aliens", ["killed"]])
def test_a_cause_that_is_missing_or_unknown_is_none(cause: Any, tmp_path: Path) -> None:
    error = {"message": "rank 1 was killed by SIGKILL"}
    run = told(tmp_path, error=error, **({} if cause is None else {"cause": cause}))
    assert (run.state, run.cause, was_killed(run)) == ("failed", None, False)


@pytest.mark.parametrize("cause", ["killed", "not-started"])
def test_what_ended_a_run_from_outside_is_read_from_its_status(cause: str, tmp_path: Path) -> None:
    run = told(tmp_path, error={"message": "it ended"}, cause=cause)
    assert run.cause == cause
    assert was_killed(run)


@pytest.mark.parametrize("gives_way", [True, False])
def test_a_tick_does_not_wait_for_drivers_that_begin_the_same_trial(
    gives_way: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, answer = [time.monotonic()], ("others had begun it", False)
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=lambda _: pytest.fail("it waits"))
    monkeypatch.setattr("shardscope.tuning.driver.time", clock)
    monkeypatch.setattr("shardscope.tuning.driver.launch", unfinished)
    monkeypatch.setattr(recovery, "over_budget", lambda *_: answer)
    session = StudySession.open(JOB, {"optimizer.lr": [1e-3]}, trials=1, name="same", baselines=False)
    driver = session.driver
    for _ in range(3):
        assert driver.tick()
        now[0] += 0.3
        assert [r.state for r in session.records()] == ["running"]
        assert not driver.live
    if gives_way:
        now[0] += 1.0
        monkeypatch.setattr(driver, "trials", 0)  # it has all its trials without this one
        assert not driver.tick()
        assert [(r.state, r.reason) for r in session.records()] == [("skipped", "others had begun it")]
    else:
        answer = (None, True)
        now[0] += 0.3
        assert driver.tick()
        assert [*driver.live] == [0]


def test_a_trial_that_is_not_settled_when_its_driver_stops_is_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "over_budget", lambda *_: ("others had begun it", False))
    session = StudySession.open(JOB, {"optimizer.lr": [1e-3]}, trials=1, name="left", baselines=False)
    assert session.driver.tick()
    session.driver.stop()
    assert not session.driver.tick()
    assert [(r.state, r.counted) for r in session.records()] == [("failed", False), ("waiting", True)]


def unfinished(job: ss.Job, *, root: Path, **_: Any) -> ss.Run:
    """A run that this process looks after, and that does not go on."""
    run = RunDir.create(job, root)
    run.write_status("running", pid=os.getpid(), process_started=process_started())
    return ss.Run.attach(run.path)
