"""What a study makes of a run's ending: read from the kind that the run directory records, never from its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from conformance.runs import small_job, wait_for
from conformance.studies import JOB, LONG
from shardscope.runtime.processes import process_started
from shardscope.runtime.rundir import RunDir
from shardscope.tuning.driver import was_killed
from shardscope.tuning.session import Session


def test_an_error_that_speaks_of_killing_fails_the_trial_at_once() -> None:
    job = JOB.replace(model=speaks_of_killing, data="digits")
    ss.tune(job, {"optimizer.lr": [1e-3]}, trials=1, objectives=["loss"], name="words")
    records = Session.open(job, {"optimizer.lr": [1e-3]}, objectives=["loss"], name="words").records()
    assert [(r.state, r.counted) for r in records] == [("failed", True)]
    assert "the loader was killed by SIGKILL" in str(records[0].reason)


def speaks_of_killing() -> Any:
    raise ValueError("the loader was killed by SIGKILL and could not be started again")


def test_a_run_that_somebody_stops_is_a_pruned_trial() -> None:
    session = Session.open(LONG, {"optimizer.lr": [1e-3]}, trials=1, name="by-hand", baselines=False)
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
