"""Drivers that hold paused trials: one of them that loses one, and one that leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

import shardscope as ss
from shardscope.runtime.record.processes import process_started
from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import RunDir, this_host
from shardscope.tuning import recovery
from shardscope.tuning.measured import TrialMetrics, TrialReader
from shardscope.tuning.pruning.halving import Paused, furthest
from shardscope.tuning.pruning.rungs import HalvingDriver, Held
from shardscope.tuning.records import DRIVER, MEASURED, NOT_COUNTED, RUN, measured_to
from shardscope.tuning.samplers import suggest
from shardscope.tuning.session import StudySession

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=8)
RATES = {"optimizer.lr": (1e-3, 1e-1, "log")}


def opened(job: ss.Job = JOB) -> tuple[StudySession, HalvingDriver]:
    session = StudySession.open(
        job, RATES, trials=3, objectives=["loss"], promote=2, baselines=False, name="rungs", sampler="random"
    )  # fmt: skip
    assert isinstance(session.driver, HalvingDriver)
    return session, session.driver


def pause(session: StudySession, driver: HalvingDriver, loss: float = 1.0) -> int:
    """Have a driver hold a trial, as if its first piece had run here; the trial's number."""
    trial = session.study.ask()
    params = suggest(trial, session.definition)
    job = session.definition.job.replace(until=1)
    run = RunDir.create(job, session.folder / "trials")
    (run.path / "checkpoints" / "rank-0").touch()
    paused = Paused(0, JOB.steps, (str(run.path),), this_host())
    measured = TrialMetrics(1, 1.0, None, 0.0, 100, 0, 0, ((1, loss, 0.5),))
    attrs = {
        DRIVER: driver._identity,
        RUN: str(run.path),
        MEASURED: measured_to(measured),
        **paused.to_attrs(),
    }
    assert driver.writer.write(trial.number, attrs)
    driver.held[trial.number] = Held(trial, params, JOB, TrialReader(Run(run)), paused)
    return trial.number


def take_over(session: StudySession, driver: HalvingDriver, number: int) -> None:
    recovery.mark_for_retry(driver.writer, number, "its driver was silent")
    recovery.replace_lost(session.study, session.study.get_trials())


def no_launch(*_: Any, **__: Any) -> Any:
    raise AssertionError("what another driver has taken over was launched")


def test_a_held_trial_that_another_driver_takes_over_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    session, driver = opened()
    lost, kept = pause(session, driver), pause(session, driver, loss=2.0)
    _, other = opened()
    take_over(session, other, lost)
    assert not driver.writer.write(lost, {"late": True})
    monkeypatch.setattr("shardscope.tuning.pruning.rungs.launch", no_launch)
    assert driver._rung_state()[1] == {kept: 0}
    take_over(session, other, kept)
    monkeypatch.setenv(recovery.SILENCE_VARIABLE, "0")
    monkeypatch.setattr(HalvingDriver, "_start", lambda self: False)
    driver.tick()  # the heartbeat finds it out too
    assert driver.held == {}


def test_a_piece_that_ends_after_its_trial_was_taken_over_is_not_held() -> None:
    session, driver = opened()
    number = pause(session, driver)
    held = driver.held.pop(number)
    _, other = opened()
    take_over(session, other, number)
    from shardscope.tuning.driver import Live

    driver.live[number] = Live(held.meter.run, held.meter, held.trial, held.params, JOB)
    driver._complete(driver.live[number])
    assert (driver.held, driver.live) == ({}, {})


def test_a_mark_whose_writer_died_before_it_ended_the_trial_says_nothing() -> None:
    session, driver = opened()
    number = pause(session, driver)
    driver.writer.write(number, {NOT_COUNTED: recovery.LOST})
    assert furthest(*driver._rung_state()) == number
    driver.held[number + 7] = driver.held[number]  # it has no figures at all
    del driver.held[number]
    assert furthest(session.study.get_trials(), {number + 7: 0}, *driver._rung_state()[2:]) is None


@pytest.mark.parametrize("host", ["here", "another machine"])
def test_paused_trials_of_a_driver_that_was_stopped_are_anybodys_at_once(host: str) -> None:
    session, driver = opened()
    number = pause(session, driver)
    parent = os.getppid()  # its process lives on, as a notebook's kernel does
    driver._identity |= {"pid": parent, "process_started": process_started(parent)}
    driver._identity |= {"host": host} if host != "here" else {}
    driver.writer.write(number, {DRIVER: driver._identity})
    watch = recovery.Watch()
    assert watch.gone(session.study.get_trials()) == []
    driver.stop()
    assert [trial.number for trial in watch.gone(session.study.get_trials())] == [number]
    assert session.record(number).state == "paused"
    assert session.record(number).host == driver._identity["host"]


# What stays on disk.


def left(session: StudySession) -> set[int]:
    """The trials whose checkpoints are on disk."""
    return {
        trial.number for trial in session.study.get_trials()
        if (Path(trial.user_attrs.get(RUN, "none")) / "checkpoints" / "rank-0").exists()
    }  # fmt: skip


def test_checkpoints_stay_as_long_as_somebody_may_go_on_from_them() -> None:
    session, driver = opened()
    _, other = opened()
    pruned, kept, lost = (pause(session, driver) for _ in range(3))
    driver._sweep()
    assert left(session) == {pruned, kept, lost}
    recovery.mark_for_retry(other.writer, lost, "its driver was silent")
    driver._sweep()
    assert left(session) == {pruned, kept, lost}, (
        "nobody has taken the lost one's place yet, and somebody will"
    )
    recovery.replace_lost(session.study, session.study.get_trials())
    driver.prune(pruned)
    other._sweep()
    assert left(session) == {kept, lost}, "its successor goes on from it"
    heir = session.study.get_trials()[-1]
    assert Paused.of(heir.user_attrs).runs == Paused.of(session.study.get_trials()[lost].user_attrs).runs
    other.writer.end(heir.number, TrialState.PRUNED, None, {})
    driver._sweep()
    assert left(session) == {kept}
    driver.stop()
    other._sweep()
    assert left(session) == {kept}


def test_a_piece_that_another_follows_is_swept_and_the_end_of_the_best_is_not() -> None:
    session, driver = opened()
    number = pause(session, driver)
    held = driver.held[number]
    last = RunDir.create(JOB, session.folder / "trials")
    (last.path / "checkpoints" / "rank-0").touch()
    driver.writer.write(number, {RUN: str(last.path)})
    driver._sweep()
    first = Path(held.paused.runs[0]) / "checkpoints"
    assert first.exists()
    assert left(session) == {number}, "if the second piece is killed, the trial goes on from the first"
    driver.writer.write(
        number, Paused(1, JOB.steps, (*held.paused.runs, str(last.path)), this_host()).to_attrs()
    )
    driver._sweep()
    assert not first.exists()
    assert left(session) == {number}
    driver.writer.end(number, TrialState.COMPLETE, [1.0], {})
    driver._sweep()
    assert left(session) == {number}


def test_checkpoints_that_the_user_asked_for_stay() -> None:
    session, driver = opened(job=JOB.replace(checkpoint=ss.Checkpoint(every=4)))
    number = pause(session, driver)
    driver.prune(number)
    driver._sweep()
    assert left(session) == {number}


def test_a_driver_killed_as_it_deletes_leaves_the_rest_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    session, driver = opened()
    pruned = [pause(session, driver) for _ in range(2)]
    for number in pruned:
        driver.prune(number)

    def killed(path: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            driver._sweep()
    assert left(session) == set(pruned)
    _, other = opened()
    other.tick()
    assert left(session) == set()
    other.stop()


def test_what_a_storage_names_outside_the_trials_is_neither_deleted_nor_gone_on_from(tmp_path: Path) -> None:
    session, driver = opened()
    run = RunDir.create(JOB.replace(until=1), tmp_path / "no trials")
    (run.path / "checkpoints" / "rank-0").touch()
    paths = [str(run.path), f"{driver.folder}/{os.path.relpath(run.path, driver.folder)}"]
    (driver.folder / "link").symlink_to(run.path)
    for path in (*paths, str(driver.folder / "link")):
        number = pause(session, driver)
        named = Paused(0, JOB.steps, (path,), this_host())
        driver.writer.write(number, {RUN: path, **named.to_attrs()})
        assert not driver._is_here(named)
        [trial] = [trial for trial in session.study.get_trials() if trial.number == number]
        assert driver._run_of(trial) is None
        assert driver._after(named, Run(run)).runs == (str(run.path),)
        driver.prune(number)
    driver._sweep()
    assert (run.path / "checkpoints" / "rank-0").exists()
