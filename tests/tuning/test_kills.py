"""Whatever of a study is killed, and when: no trial is lost, none counts twice, and the study goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardscope as ss
from conformance.runs import agent_pid, all_gone, family, rank_pids, wait_for
from conformance.studies import JOB, LONG, SPACE, TRIALS, faults_of, instant, running, said, start_driver
from shardscope.tuning import recovery, storage
from shardscope.tuning.records import NOT_BEGUN
from shardscope.tuning.session import StudySession

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that others are copies of."""
    return ss.launch(JOB, root=tmp_path_factory.mktemp("recorded")).wait(100).path


def until_it_runs(session: StudySession, number: int | None = None) -> ss.Run:
    """Tick until a trial has taken steps; its run."""

    def steps() -> bool:
        session.driver.tick()
        live = session.driver.live if number is None else session.driver.live.keys() & {number}
        return bool(live) and all(session.driver.live[n].measured.steps > 2 for n in live)

    wait_for(steps)
    return session.driver.live[max(session.driver.live) if number is None else number].run


# The driver.


def test_a_driver_killed_at_any_of_its_writes_loses_and_doubles_nothing(
    recorded: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "conformance.studies", str(tmp_path), str(recorded)], capture_output=True, text=True,
        timeout=280, check=False, cwd=Path(__file__).parents[1], env={**os.environ, recovery.SILENCE_VARIABLE: "0.5"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kills = sorted(map(json.loads, done.stdout.splitlines()), key=lambda kill: kill["write"])
    ends = [kill["ends"][0] for kill in kills]
    assert [kill["write"] for kill in kills][: ends.index(0)] == [*range(1, 1 + ends.index(0))]
    assert ends.index(0) > 15
    assert set(ends) == {-signal.SIGKILL, 0}
    for kill in kills:
        records = StudySession.open(name="killed", root=kill["root"]).records()
        assert (kill["ends"][2], faults_of(records, TRIALS)) == (0, []), f"killed at write {kill['write']}"


def test_a_kernel_is_interrupted_goes_on_and_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start_driver("kernel")
    number, run = running(driver)
    assert number == 0
    processes = family(run)
    asked = time.monotonic()
    os.killpg(driver.pid, signal.SIGINT)  # as Jupyter interrupts a cell
    assert said(driver) == "interrupted"
    assert time.monotonic() - asked < 60.0  # the grace is one second; the rest is for a busy machine
    assert all_gone(processes)
    number, run = running(driver)  # the same kernel has gone on: the trial is run again, first
    assert number == 1
    processes = family(run)
    driver.kill()
    driver.wait()
    assert all_gone(processes)
    session = StudySession.open(name="kernel", trials=2, baselines=False)
    run = until_it_runs(session)
    before = session.records()
    assert [(r.state, r.retry_of) for r in before] == [("failed", None), ("failed", 0), ("running", 1)]
    assert before[0].params == before[1].params == before[2].params
    assert [r.reason for r in before[:2]] == ["the study was stopped", "its driver ended before the run did"]
    session.driver.stop()
    assert not run.is_alive


# Processes of a trial's run.


def _rank(run: ss.Run) -> int:
    return rank_pids(run)[1]


def _server(run: ss.Run) -> int:
    server = psutil.Process(agent_pid(run)).parent()
    assert server is not None
    return server.pid


@pytest.mark.sampled
@pytest.mark.parametrize("victim", [_rank, agent_pid, _server], ids=["rank", "agent", "launch server"])
def test_a_trial_whose_run_is_killed_is_run_again_with_the_same_settings(
    victim: Callable[[ss.Run], int],
) -> None:
    session = StudySession.open(LONG, SPACE, trials=1, name="victim", baselines=False)
    first = until_it_runs(session)
    processes = family(first)
    os.kill(victim(first), signal.SIGKILL)
    wait_for(lambda: session.driver.tick() and 1 in session.driver.live)
    assert all_gone(processes)
    records = session.records()
    assert [(r.state, r.counted) for r in records] == [("failed", False), ("running", True)]
    assert records[0].params == records[1].params
    session.driver.stop()


def test_a_trial_that_is_killed_every_time_fails_and_the_study_goes_on(tmp_path: Path) -> None:
    job = JOB.replace(model=dies_of_memory, data="digits")
    ss.tune(job, {"optimizer.lr": [1e-3]}, trials=1, objectives=["loss"], name="memory")
    records = StudySession.open(job, {"optimizer.lr": [1e-3]}, objectives=["loss"], name="memory").records()
    assert [(r.state, r.counted) for r in records] == [("failed", False)] * 2 + [("failed", True)]
    assert "was killed by SIGKILL" in str(records[2].reason)
    assert "memory ran out" in str(records[2].reason)


def dies_of_memory() -> Any:
    """A model whose rank the system kills, as it does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trial_that_crashes_fails_with_its_sentence_and_is_not_run_again() -> None:
    job = JOB.replace(model=crashes, data="digits")
    study = ss.tune(job, {"seed": [1, 2]}, trials=1, objectives=["loss"], name="crash")
    records = StudySession.open(job, {"seed": [1, 2]}, objectives=["loss"], name="crash").records()
    assert [(r.state, r.counted) for r in records] == [("failed", True)]
    assert "failed before its first step: ValueError: no such layer" in str(records[0].reason)
    assert "\n" not in str(records[0].reason)
    assert len(study.trials) == 1


def crashes() -> Any:
    raise ValueError("no such layer")


# The journal.


def test_a_torn_line_and_a_dead_writers_lock_are_cleared_away(recorded: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("shardscope.tuning.driver.launch", instant(recorded))
    ss.tune(JOB, SPACE, trials=1, name="torn", baselines=False)
    session = StudySession.open(JOB, SPACE, trials=2, name="torn", baselines=False)
    journal = session.folder / "journal.log"
    whole = journal.read_bytes()
    with journal.open("ab") as file:
        file.write(b'{"op_code":8,"worker_id":"somebody","trial')
    Path(f"{journal}.lock").symlink_to(journal)  # Optuna's own lock, whose holder was killed
    assert len(session.records()) == 1
    session.run()
    assert faults_of(StudySession.open(name="torn", baselines=False).records(), 2) == []
    assert journal.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_a_full_disk_is_waited_for_and_said(recorded: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("shardscope.tuning.driver.launch", instant(recorded))
    session = StudySession.open(JOB, SPACE, trials=1, name="full", baselines=False)
    monkeypatch.setattr(storage, "_RETRY_S", 0.01)
    fsync, left = os.fsync, [3]

    def full(file: int) -> None:
        if left[0] and session.driver.live:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    session.run()
    assert left == [0]
    assert faults_of(session.records(), 1) == []


# The answer to a commit.


@pytest.mark.filterwarnings("error:The constraint value is ignored:UserWarning")
def test_no_answer_to_a_commit_is_missed_without_harm(
    recorded: Path, monkeypatch: Any, tmp_path: Path
) -> None:
    """The database has done what it was told, and the connection breaks before it says so; at every write in turn."""
    from sqlalchemy import event
    from sqlalchemy.exc import OperationalError
    from sqlalchemy.orm import Session as Connection

    monkeypatch.setattr("shardscope.tuning.driver.launch", instant(recorded))
    monkeypatch.setattr("shardscope.tuning.driver._READ_EVERY_S", 0.01)
    monkeypatch.setattr(storage, "_RETRY_S", 0.01)
    monkeypatch.setenv(recovery.SILENCE_VARIABLE, "0.5")
    written, at, is_open = [0], [0], False
    url = f"sqlite:///{tmp_path / 'studies.db'}"

    opened = storage.open_storage(url, "any")
    commit = Connection.commit

    def broken(self: Any) -> None:
        wrote = self.connection().info.pop("wrote", False)
        commit(self)
        if wrote:
            written[0] += 1
            if is_open and written[0] == at[0]:
                raise OperationalError("COMMIT", {}, ConnectionError("the connection broke"))

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith(("INSERT", "UPDATE")):
            connection.info["wrote"] = True

    event.listen(opened._backend.engine, "after_cursor_execute", note)
    monkeypatch.setattr(Connection, "commit", broken)
    while written[0] >= at[0]:
        written[0] = 0
        at[0] += 1
        name, is_open = f"commit-{at[0]}", False
        session = StudySession.open(
            JOB, SPACE, trials=1, name=name, storage=opened, sampler="random", seed=at[0], baselines=False
        )
        written[0], is_open = 0, True  # making the study waits for nothing: there, an outage is said at once
        while session.driver.tick():
            time.sleep(0.001)
        is_open = False
        assert faults_of(session.records(), 1) == [], f"answer {at[0]} was lost"
    assert at[0] > 7


def test_what_a_storage_refuses_is_said_at_once() -> None:
    """Optuna raises the same error for an outage and for a value that the database will never take."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import DataError

    def call() -> None:
        raise StorageInternalError("An exception is raised during the commit.") from DataError(
            "INSERT", {}, ValueError("value too long")
        )

    with pytest.raises(ss.errors.StudyError, match=r"rejects the call: .*value too long"):
        storage.StorageRetry(60.0)(call)


# Other machines, and other drivers.


@pytest.mark.weekly
def test_a_silent_driver_elsewhere_is_given_up_and_finds_its_trial_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(recovery.SILENCE_VARIABLE, "2")
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "this_host", lambda: "another machine")
        far = StudySession.open(LONG, SPACE, trials=1, name="far", baselines=False)
    run = until_it_runs(far)
    near = StudySession.open(name="far", trials=1, baselines=False)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:  # as long as its heart beats, its trial is left to it
        far.driver.tick()
        near.driver.tick()
        time.sleep(0.02)
    assert [r.state for r in near.records()] == ["running"]
    wait_for(lambda: near.driver.tick() and near.driver.live)
    records = near.records()
    assert [(r.state, r.counted) for r in records] == [("failed", False), ("running", True)]
    assert records[0].params == records[1].params
    wait_for(lambda: not far.driver.tick() or not far.driver.live)
    assert not run.is_alive
    far.driver.stop()
    near.driver.stop()


@pytest.mark.parametrize("baselines", [True, False], ids=["queued", "drawn"])
def test_two_drivers_begin_the_last_trial_at_the_same_moment(
    baselines: bool, recorded: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("shardscope.tuning.driver.launch", instant(recorded))
    one = StudySession.open(JOB, SPACE, trials=1, name="last", sampler="random", baselines=baselines)
    other = StudySession.open(name="last", trials=1, sampler="random", seed=1, baselines=baselines)

    class Meanwhile:
        """The other driver begins a trial between this one's look at the study and its asking."""

        def before_asking(self, study: Any, trials: Any) -> None:
            other.driver._start()

    one.driver.choose = Meanwhile()
    while one.driver.tick() | other.driver.tick():
        time.sleep(0.005)
    records = [r for r in one.records() if r.state not in NOT_BEGUN]
    assert faults_of(records, 1) == []
    over_budget = [r for r in records if not r.counted]
    assert over_budget
    assert {r.reason for r in over_budget} == {"other drivers started the last trials at the same moment"}


def test_a_lost_trial_keeps_its_place_from_a_driver_that_looks_at_the_wrong_moment(
    recorded: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("shardscope.tuning.driver.launch", instant(recorded))
    one = StudySession.open(JOB, SPACE, trials=1, name="place", sampler="random", baselines=False)
    other = StudySession.open(name="place", trials=1, sampler="random", seed=1, baselines=False)
    one.driver._start()
    recovery.mark_for_retry(one.driver.writer, 0, "lost, and nobody has put another in its place yet")
    one.driver.live.clear()
    while other.driver.tick():
        time.sleep(0.005)
    assert faults_of(other.records(), 1) == []
    assert [r.retry_of for r in other.records()] == [None, 0]


def test_trials_in_parallel_count_right() -> None:
    most = 0

    def look(session: StudySession) -> None:
        nonlocal most
        most = max(most, len(session.driver.live))

    ss.tune(JOB, SPACE, trials=3, name="parallel", parallel=2, on_tick=look)
    assert most == 2
    assert faults_of(StudySession.open(name="parallel").records(), 3) == []


# A stop, while the storage is away.


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_stop_answers_while_the_storage_does_not(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = StudySession.open(LONG, SPACE, trials=1, name="away", baselines=False)
    run, is_back = until_it_runs(session), threading.Event()

    def away(*_: Any, **__: Any) -> Any:
        if how == "hangs":
            is_back.wait(200)
        raise ConnectionError("refused")

    with monkeypatch.context() as patch:
        patch.setattr("shardscope.tuning.driver.TOLD_WITHIN_S", 0.5)
        patch.setattr(session.driver.writer, "end", away)
        asked = time.monotonic()
        session.driver.stop()
        assert time.monotonic() - asked < 60.0
    is_back.set()
    assert not run.is_alive
    assert [r.state for r in session.records()] == ["running"]  # nobody could be told
    again = StudySession.open(name="away", trials=1, baselines=False)  # in the same kernel
    wait_for(lambda: again.driver.tick() and 1 in again.driver.live)
    assert [(r.state, r.counted) for r in again.records()] == [("failed", False), ("running", True)]
    again.driver.stop()


# Begun otherwise.


def test_a_study_of_this_name_that_something_else_began_is_refused(tmp_path: Path) -> None:
    import optuna

    url = f"sqlite:///{tmp_path / 'others.db'}"
    theirs = optuna.create_study(storage=url, study_name="theirs")
    theirs.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    for given in ({}, {"job": JOB, "space": SPACE}):
        with pytest.raises(
            ss.errors.StudyError, match="another program created it; give your study another name"
        ):
            ss.tune(**given, name="theirs", storage=url)  # type: ignore[arg-type]
    assert len(theirs.trials) == 2
