"""Successive halving on checkpoints: who goes on, that going on changes nothing, and what a killed driver leaves."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

import shardscope as ss
from shardscope.errors import SpecError, StudyError
from shardscope.spec.models import model_config
from shardscope.tuning.measured import TrialMetrics, evaluated
from shardscope.tuning.pruning.halving import Paused, Rungs, _cost, best, furthest, promotable
from shardscope.tuning.pruning.rungs import HalvingDriver, meter_of
from shardscope.tuning.records import MEASURED, PAUSED, TrialRecord, measured_from, measured_to
from shardscope.tuning.session import StudySession

JOB = ss.Job(
    model="mlp", data="digits", strategy="ring", world_size=2, steps=8, optimizer="nesterov",
    compression=ss.Compression("topk", ratio=0.05), record=ss.Record(memory_first=0, memory_every=None),
)  # fmt: skip
RATES = {"optimizer.lr": (1e-3, 1e-1, "log")}
RUNGS = Rungs(eta=2, least=0.25)


# Who goes on.


def job_of(trial: FrozenTrial) -> ss.Job:
    return JOB


def trial_at(
    number: int, rung: int, losses: list[float], sent: int = 8, state: str = "RUNNING"
) -> FrozenTrial:
    """A trial of eight steps that came to a rung of `RUNGS`, with the losses at steps 2, 4 and 8 as far as it came."""
    curve = tuple((step, loss, 0.5) for step, loss in zip((2, 4, 8), losses, strict=False))
    steps = curve[-1][0]
    measured = TrialMetrics(
        steps, step_s=1.0, compute_s=None, codec_s=0.0, bytes=sent * steps, messages=0, memory=0, curve=curve
    )
    attrs = {MEASURED: measured_to(measured), **Paused(rung, 8, (f"run-{number}",), "here").to_attrs()}
    trial = create_trial(
        state=TrialState.COMPLETE if state == "COMPLETE" else TrialState.PRUNED,
        values=[losses[-1]] if state == "COMPLETE" else None, user_attrs=attrs,
        params={"x": 0.5}, distributions={"x": FloatDistribution(0, 1)},
    )  # fmt: skip
    trial.number, trial.state = number, TrialState[state]
    return trial


def test_the_best_of_a_rung_go_on_from_the_highest_rung_down() -> None:
    trials = [trial_at(0, 0, [3.0]), trial_at(1, 0, [1.0]), trial_at(2, 1, [2.0, 0.9]), trial_at(3, 0, [4.0])]
    held = {0: 0, 1: 0, 2: 1, 3: 0}
    assert best(trials, 0, RUNGS, ["loss"], job_of) == [1, 2, 0, 3]
    assert best(trials, 1, RUNGS, ["loss"], job_of) == [2]
    assert (
        promotable(trials, held, RUNGS, ["loss"], job_of) == 1
    )  # alone on its rung, 2 waits; of four, two go on
    assert promotable(trials[1:], {1: 0, 2: 1, 3: 0}, RUNGS, ["loss"], job_of) == 1
    assert promotable(trials, {0: 0, 3: 0}, RUNGS, ["loss"], job_of) is None
    both = [*trials, trial_at(4, 1, [0.8, 0.7])]
    assert promotable(both, {**held, 4: 1}, RUNGS, ["loss"], job_of) == 4
    assert furthest(trials, held, RUNGS, ["loss"], job_of) == 2


def test_several_objectives_go_by_fronts() -> None:
    trials = [
        trial_at(n, 0, [loss], sent)
        for n, (loss, sent) in enumerate([(1, 9), (2, 5), (3, 1), (3, 9), (2, 6)])
    ]
    order = best(trials, 0, RUNGS, ["loss", "bytes"], job_of)
    assert set(order[:3]) == {0, 1, 2}
    assert order[:2] in ([0, 2], [2, 0])  # the ends of a front first
    assert order[3] == 4
    assert order[4] == 3


def test_methods_whose_steps_differ_are_not_ranked_by_their_first_steps() -> None:
    """At step 2 of 8 local SGD has sent nothing and has no period behind it, and 1-bit Adam is still uncompressed."""
    jobs = {
        0: JOB.replace(compression="int8"),
        1: JOB.replace(compression=ss.Compression("local-sgd", every=2)),
        2: JOB.replace(compression=ss.Compression("local-sgd", every=8)),
    }
    measured = TrialMetrics(2, 1.0, None, 0.0, 200_000, 0, 0, ((2, 1.0, 0.5),), plain_s=1.0)
    trials = [trial_at(number, 0, [1.0]) for number in jobs]
    for trial in trials[:2]:
        trial.user_attrs[MEASURED] = measured_to(measured)
    quiet = TrialMetrics(2, None, None, 0.0, 0, 0, 0, ((2, 1.0, 0.5),), plain_s=1.0)
    trials[2].user_attrs[MEASURED] = measured_to(quiet)

    def cost(name: str) -> dict[int, float]:
        return {
            n: _cost(name, measured_from(trials[n].user_attrs[MEASURED]), job, 2) for n, job in jobs.items()
        }

    assert cost("seconds") == {0: 8.0, 1: 8.0, 2: 8.0}
    whole = cost("bytes")
    assert (whole[0], whole[1]) == (800_000, 800_000)
    assert whole[2] == pytest.approx(
        2 * model_config("mlp").num_params * 4, rel=1e-3
    )  # one average, of two ranks


def test_what_has_ended_counts_on_its_rungs_and_what_failed_does_not() -> None:
    ended = trial_at(5, 2, [0.5, 0.4, 0.3], state="COMPLETE")
    failed = trial_at(6, 0, [0.1], state="FAIL")
    trials = [trial_at(0, 0, [3.0]), ended, failed, trial_at(1, 0, [math.nan])]
    assert best(trials, 0, RUNGS, ["loss"], job_of) == [5, 0, 1]
    assert best(trials, 1, RUNGS, ["loss"], job_of) == [5]


def test_rungs_lie_at_growing_shares() -> None:
    assert Rungs().untils(90) == (10, 30, 90)
    assert RUNGS.untils(8) == (2, 4, 8)
    assert Rungs(eta=3, least=0.5).untils(3) == (2, 3)
    assert Rungs(eta=4, least=0.001).untils(3) == (1, 2, 3, 3, 3, 3)


@pytest.mark.parametrize(
    ("promote", "said"),
    [
        (1, "eta=1 is not a reduction factor"),
        (2.5, "integer of at least 2"),
        ((3, 1.5), "least=1.5 is not a valid fraction"),
        (True, "eta=True"),
    ],
)
def test_rungs_that_cannot_be_are_refused(promote: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ss.tune(
            JOB, RATES, promote=Rungs(*promote) if isinstance(promote, tuple) else promote, name="refused"
        )


def test_an_objective_of_ones_own_cannot_rank_what_is_on_its_way() -> None:
    with pytest.raises(SpecError, match="objective 'mine' is user-defined"):
        ss.tune(JOB, RATES, objectives={"loss": None, "mine": lambda run: 1.0}, promote=2, name="refused")


# That it changes nothing, and saves.


def pieces_of(session: StudySession, record: TrialRecord) -> list[ss.Run]:
    paused = Paused.of(session.study.get_trials()[record.number].user_attrs)
    paths = dict.fromkeys([*(paused.runs if paused else ()), record.run])
    return [ss.Run.attach(path) for path in paths if path]


def steps_of(session: StudySession, record: TrialRecord) -> Counter[int]:
    """How often each step of a trial was taken, over its pieces."""
    return Counter(step for run in pieces_of(session, record) for step in run.metrics()["step"])


def sent_by(runs: list[ss.Run], kind: str | None = None) -> int:
    """Bytes that all ranks sent in steps; of one kind of collective."""
    rows = [row for run in runs for event in run.events("step") for row in event["traffic"].items()]
    return sum(row["sent_bytes"] for name, row in rows if kind in (None, name))


@pytest.mark.slow
def test_a_promoted_trial_ends_where_an_uninterrupted_run_does_and_no_step_is_taken_twice() -> None:
    given = {"objectives": ["loss", "bytes"], "pruner": "none", "baselines": False, "sampler": "random"}
    session = StudySession.open(JOB, RATES, trials=4, promote=RUNGS, name="rungs", seed=1, **given)  # type: ignore[arg-type]
    session.run()
    records = session.records()
    came = Counter(max(steps_of(session, record)) for record in records)
    assert came == {2: 2, 4: 1, 8: 1}
    assert all(set(steps_of(session, record).values()) == {1} for record in records)
    for record in records:
        assert record.measured is not None
        assert record.measured.steps == sum(steps_of(session, record).values())
        if record.state == "pruned":
            assert "not among the best 1 in 2 at" in str(record.reason)
    ended = next(record for record in records if record.state == "complete")
    whole = ss.launch(evaluated(session.job(ended.number))).wait(100)
    assert ended.values is not None
    assert ended.measured is not None
    assert ended.values["loss"] == whole.summary().validation_loss
    assert sent_by(pieces_of(session, ended), "packet_all_gather") == sent_by([whole], "packet_all_gather")
    assert ended.measured.bytes == sent_by(pieces_of(session, ended))
    assert [row[0] for row in ended.measured.curve] == list(range(1, 9))


# What a killed driver leaves.


def checkpoints_of(run: str) -> list[Path]:
    return list((Path(run) / "checkpoints").iterdir())


_KILLED = """
import os, signal, sys
import shardscope as ss
from shardscope.tuning.pruning.halving import Rungs
from shardscope.tuning.session import StudySession

def look(session):
    if len(session.driver.held) >= 2 and session.driver.live:
        os.kill(os.getpid(), signal.SIGKILL)

job = ss.Job.from_json(open(sys.argv[1]).read())
session = StudySession.open(job, {"optimizer.lr": (1e-3, 1e-1, "log")}, trials=4, objectives=["loss"], baselines=False,
                       promote=Rungs(eta=4, least=0.25), name="killed", sampler="random")
session.run(on_tick=look)
"""


@pytest.mark.slow
def test_what_a_killed_driver_had_paused_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(JOB.to_json())
    killed = subprocess.run([sys.executable, "-c", _KILLED, tmp_path / "job.json"], timeout=280, check=False)
    assert killed.returncode == -signal.SIGKILL
    before = StudySession.open(name="killed")
    paused = {
        trial.number: Paused.of(trial.user_attrs)
        for trial in before.study.get_trials()
        if PAUSED in trial.user_attrs
    }
    assert len(paused) == 2
    assert all(checkpoints_of(held.runs[-1]) for held in paused.values() if held is not None)
    session = StudySession.open(name="killed", trials=4)
    session.run()
    ended = next(record for record in session.records() if record.state == "complete")
    assert {str(path.parent.parent) for path in session.folder.glob("trials/*/checkpoints/*")} <= {ended.run}
    records = [record for record in session.records() if record.counted]
    assert len(records) == 4
    assert Counter(record.state for record in records) == {"complete": 1, "pruned": 3}
    again = {record.retry_of for record in records}
    assert set(paused) < again
    for record in records:
        assert set(steps_of(session, record).values()) == {1}
        if record.retry_of in paused:
            held = Paused.of(session.study.get_trials()[record.number].user_attrs)
            earlier = paused[record.retry_of]
            assert held is not None
            assert earlier is not None
            assert held.runs[: len(earlier.runs)] == earlier.runs


@pytest.mark.slow
def test_paused_trials_wait_while_a_study_is_stopped_and_can_be_pruned_by_hand() -> None:
    session = StudySession.open(
        JOB, RATES, trials=3, objectives=["loss"], promote=3, baselines=False, name="stopped"
    )
    driver = session.driver
    assert isinstance(driver, HalvingDriver)
    while len(driver.held) < 2:
        driver.tick()
    first, second = sorted(driver.held)
    assert {session.record(number).state for number in driver.held} == {"paused"}
    driver.prune(first)
    runs = driver.held[second].paused.runs
    driver.stop()
    assert session.record(first).state == "pruned"
    assert session.record(first).reason == "pruned by hand"
    with pytest.raises(StudyError, match="promotes one trial in 3, from 0.111 of the samples onwards"):
        ss.tune(None, trials=3, promote=2, name="stopped")
    ss.tune(None, trials=3, name="stopped")
    records = [record for record in session.records() if record.counted]
    assert len(records) == 3
    taken = next(record for record in records if record.retry_of == second)
    assert set(steps_of(session, taken).values()) == {1}
    held = Paused.of(session.study.get_trials()[taken.number].user_attrs)
    assert held is not None
    assert held.runs[:1] == runs[:1]
    assert meter_of(held.runs).poll().steps == sum(steps_of(session, taken).values()) - (
        0 if taken.run in held.runs else len(ss.Run.attach(str(taken.run)).metrics())
    )
