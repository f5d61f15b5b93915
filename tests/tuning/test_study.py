"""Studies of real runs: what is told, what is not counted, what goes on after a stop."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from torch import nn

import shardscope as ss
from conformance.studies import JOB as COPIED
from conformance.studies import instant
from shardscope.errors import ShardscopeError, SpecError, StudyError
from shardscope.runtime.record.rundir import RunDir
from shardscope.tuning.driver import Live
from shardscope.tuning.samplers import suggest
from shardscope.tuning.session import StudySession

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=6)
RATES = {"optimizer.lr": (1e-3, 1e-1, "log")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that others are copies of."""
    return ss.launch(COPIED, root=tmp_path_factory.mktemp("recorded")).wait(100).path


def test_every_trial_is_a_run_and_its_values_are_those_of_the_run() -> None:
    study = ss.tune(JOB, {**RATES, "compression": ["none", "int8"]}, trials=4, name="values")
    session = StudySession.open(name="values")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4
    for record in session.records():
        summary = session.trial_run(record.number).summary()
        assert record.values is not None
        assert record.measured is not None
        assert record.values["loss"] == summary.validation_loss != summary.test_loss
        assert record.measured.test == (summary.test_loss, 1 - summary.test_accuracy)
        assert record.values["bytes"] == sum(
            row["sent_bytes"]
            for event in session.trial_run(record.number).events("step")
            for row in event["traffic"].values()
        )
        assert record.values["seconds"] == pytest.approx(summary.step_time_s * 6)
        assert session.job(record.number).optimizer.lr == record.params["optimizer.lr"]
    report = session.report()
    loss, _ = session.record(report.rows[0].number).measured.test
    assert (
        f"On the test split, on which no choice was based, trial {report.rows[0].number} has loss {loss:.4g}"
        in str(report)
    )


@pytest.mark.slow
def test_what_does_not_go_together_costs_no_run_and_is_not_counted() -> None:
    space = {"optimizer": ["adamw", "nesterov"], "compression": ["onebit-adam", "none"], "seed": [*range(8)]}
    ss.tune(JOB, space, trials=4, name="impossible", baselines=False, sampler="random", seed=0)
    records = StudySession.open(name="impossible").records()
    impossible = [
        record
        for record in records
        if record.params["optimizer"] != "adamw" and "onebit-adam" in record.params.values()
    ]
    assert sum(record.counted for record in records) == 4
    assert impossible
    assert {record.state for record in impossible} == {"impossible"}
    assert all(
        record.run is None and "cannot be combined with" in str(record.reason) for record in impossible
    )


class AfterTwo:
    """Gives a trial up once it was evaluated twice."""

    def reason(self, live: Live, trials: list[FrozenTrial]) -> str | None:
        return "twice is enough" if live.decided_at == 2 else None


def test_a_trial_that_is_given_up_takes_no_step_after_the_evaluation_that_it_was_judged_by() -> None:
    def model() -> nn.Module:
        from shardscope.runtime.agent.control import StopControl

        whole = StopControl.evaluated  # in the ranks: however long the verdict takes on a busy machine
        StopControl.evaluated = lambda self, step, _: whole(self, step, 60.0)  # type: ignore[method-assign]
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    job = JOB.replace(model=model, eval_every=1)
    ss.tune(job, RATES, trials=1, name="given-up", objectives=["loss"], pruner=AfterTwo())
    (record,) = StudySession.open(name="given-up").records()
    assert record.measured is not None
    assert (record.state, record.reason, record.measured.steps) == ("pruned", "twice is enough", 2)
    assert record.run is not None
    assert RunDir(Path(record.run)).approval.read_text() == "1"


@pytest.mark.slow
def test_a_study_that_was_stopped_goes_on_and_loses_nothing() -> None:
    far = ss.Link(bandwidth="1 Gbit/s", latency="10 ms")  # two seconds a trial
    session = StudySession.open(JOB.replace(steps=100, link=far), RATES, trials=3, name="stopped")

    def stop(session: StudySession) -> None:
        if session.trial_run(0).events("step"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.run(on_tick=stop)
    before = session.records()
    assert [record.state for record in before] == ["failed", "waiting"]
    ss.tune(None, name="stopped", trials=3)
    records = StudySession.open(name="stopped").records()
    retried = records[1]
    assert retried.retry_of == 0
    assert retried.params == records[0].params
    assert sum(record.counted for record in records) == 3
    assert [record.state for record in records if record.counted] == ["complete"] * 3


def test_an_objective_of_ones_own_that_is_not_a_number_fails_its_trial_alone() -> None:
    values = iter([math.nan, 1.0])

    def mine(run: ss.Run) -> float:
        return next(values)

    ss.tune(JOB, RATES, trials=2, objectives={"loss": None, "mine": mine}, name="own")
    with pytest.raises(StudyError, match="user-defined objectives .*; pass them again"):
        StudySession.open(name="own")
    records = StudySession.open(JOB, RATES, objectives={"loss": None, "mine": mine}, name="own").records()
    assert [record.state for record in records] == ["failed", "complete"]
    assert "objective 'mine' is nan" in str(records[0].reason)


@pytest.mark.slow
def test_a_trial_that_diverges_fails_with_its_sentence_and_the_study_goes_on() -> None:
    job = JOB.replace(optimizer=ss.Optimizer("sgd"))
    ss.tune(job, {"optimizer.lr": [1e30, 0.1]}, trials=5, objectives=["loss"], name="diverges", seed=0)
    records = StudySession.open(name="diverges").records()
    failed = [record for record in records if record.state == "failed"]
    assert failed
    assert all("lower the learning rate" in str(record.reason) for record in failed)
    assert any(record.state == "complete" for record in records)


def test_a_study_that_has_changed_is_refused_and_says_in_what() -> None:
    ss.tune(JOB, RATES, trials=1, name="changed")
    with pytest.raises(StudyError, match=r"the space has changed in optimizer\.lr"):
        ss.tune(JOB, {"optimizer.lr": (1e-3, 1.0, "log")}, trials=1, name="changed")
    with pytest.raises(StudyError, match="the job differs in steps"):
        ss.tune(JOB.replace(steps=7), RATES, trials=1, name="changed")
    with pytest.raises(StudyError, match="the objectives were loss, seconds, bytes"):
        ss.tune(JOB, RATES, objectives=["loss"], trials=1, name="changed")
    with pytest.raises(StudyError, match="there is no study 'chnaged'"):
        ss.tune(name="chnaged")
    wider = {"optimizer.lr": (1e-3, 1.0, "log")}
    for given, said in [
        ({"space": wider}, r"the space has changed in optimizer\.lr"),
        ({"objectives": ["loss"]}, "the objectives were loss, seconds, bytes"),
        ({"objectives": {"loss": None, "mine": len}}, "the objectives were loss, seconds, bytes"),
        ({"equal": "steps"}, "equal was 'samples'"),
        ({"job": JOB, "space": RATES, "baselines": False}, "baselines was True"),
    ]:
        with pytest.raises(StudyError, match=f"was created with other arguments: {said}") as caught:
            StudySession.open(name="changed", **given)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert StudySession.open(name="changed", space=RATES, objectives=["loss", "seconds", "bytes"]).records()


def test_a_space_that_goes_only_where_steps_are_equal_goes_there() -> None:
    job, space = JOB.replace(until=5), {"batch": ss.PowersOfTwo(64, 128)}
    with pytest.raises(
        SpecError, match=r"space\['batch'\]: 128 is not possible: until=5 is more than steps=3"
    ):
        StudySession.open(job, space, name="samples")
    assert StudySession.open(job, space, equal="steps", name="steps").definition.equal == "steps"


def test_trials_that_others_queue_or_add_are_taken_as_far_as_they_go(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, in a dashboard, with another tool: without any of the attributes of a trial that was run here."""
    monkeypatch.setattr("shardscope.tuning.driver.launch", instant(recorded))
    space = {"optimizer": ["adamw", "nesterov"], **RATES}
    session = StudySession.open(
        COPIED, space, trials=6, objectives=["loss", "bytes"], name="others", baselines=False
    )
    rates = optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True)
    session.study.add_trial(
        optuna.create_trial(
            params={"optimizer.lr": 0.01}, distributions={"optimizer.lr": rates}, values=[9.0, 9.0]
        )
    )
    for queued in ({"optimizer.lr": 5.0}, {"optimizer": "lion"}, {"optimizer.lr": "fast"}, {"colour": "red"}):
        session.study.enqueue_trial(queued)
    session.run()
    records = session.records()
    assert [record.state for record in records] == ["complete", *["impossible"] * 4, *["complete"] * 5]
    assert [str(r.reason) for r in records[1:5]] == [
        "the trial was queued with optimizer.lr=5.0, which is outside the space",
        "the trial was queued with optimizer='lion', which is outside the space",
        "the trial was queued with optimizer.lr='fast', which is outside the space",
        "the trial was queued with colour='red', which is outside the space",
    ]
    assert sum(record.counted for record in records) == 6
    assert "6 complete" in str(session.report())
    session.study.add_trial(
        optuna.create_trial(
            params={"colour": 1.0},
            distributions={"colour": optuna.distributions.FloatDistribution(0, 2)},
            values=[9, 9],
        )
    )
    assert StudySession.open(name="others").records()[-1].params == {}


def test_a_trial_of_another_kind_that_others_add_is_said(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardscope.tuning.driver.launch", instant(recorded))
    session = StudySession.open(COPIED, RATES, trials=2, objectives=["loss"], name="kinds", baselines=False)
    kind = optuna.distributions.CategoricalDistribution(["slow", "fast"])
    session.study.add_trial(
        optuna.create_trial(params={"optimizer.lr": "slow"}, distributions={"optimizer.lr": kind}, value=1.0)
    )
    with pytest.raises(
        StudyError, match="another program, whose 'optimizer.lr' has a different type"
    ) as caught:
        session.run()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "nobodys"},
        {"name": "nobodys", "job": JOB, "space": RATES, "sampler": "tpp"},
        {"name": "nobodys", "job": JOB, "space": RATES, "promote": 1},
        {"name": "nobodys", "job": JOB, "space": RATES, "pruner": "medain"},
        {"name": "nobodys", "job": JOB, "space": RATES, "storage": "sqlite:////nowhere/at/all.db"},
        {"name": "nobodys", "storage": "sqlite:////nowhere/at/all.db"},
    ],
)
def test_what_is_refused_leaves_nothing_behind(given: dict[str, object], runs_root: Path) -> None:
    with pytest.raises(ShardscopeError):
        StudySession.open(**given)  # type: ignore[arg-type]
    assert not (runs_root / "studies").exists()


@pytest.mark.slow
def test_two_studies_share_one_storage(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    first = ss.tune(JOB, RATES, trials=2, name="one", storage=url)
    second = ss.tune(JOB.replace(steps=5), RATES, trials=1, name="two", storage=url)
    assert (len(first.trials), len(second.trials)) == (2, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trials": 0}, "trials=0 is not valid; use an integer from 1"),
        ({"trials": True}, "trials=True is not valid"),
        ({"parallel": 1.5}, "parallel=1.5 is not valid"),
        ({"seed": True}, "seed=True is not valid"),
        ({"seed": -1}, "seed=-1 is not valid; use an integer from 0 to 4294967295"),
        ({"objectives": ["seconds"]}, "contain no measure of quality"),
        ({"objectives": ["lss"]}, "did you mean 'loss'"),
        ({"objectives": ["loss", "loss"]}, "contain a duplicate"),
        ({"sampler": "tpp"}, "did you mean 'tpe'"),
        ({"sampler": "cma-es"}, "minimises only one objective, got 3"),
        ({"name": "../up"}, "is not a valid name for a study"),
    ],
)
def test_a_study_that_cannot_be_is_refused_in_one_sentence(given: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        ss.tune(JOB, RATES, **{"name": "refused", **given})  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_of_numpy_are_taken() -> None:
    session = StudySession.open(
        JOB, RATES, trials=np.int64(3), parallel=np.int32(2), seed=np.int64(3), name="numpy"
    )
    assert (session.driver.trials, session.driver.parallel) == (3, 2)
    assert StudySession.open(name="numpy").driver.trials == 3


@pytest.mark.parametrize("sampler", ["cma-es", optuna.samplers.CmaEsSampler(warn_independent_sampling=False)])
def test_a_sampler_that_unpickles_is_kept_from_storages_that_others_write(
    sampler: Any, tmp_path: Path
) -> None:
    """Optuna's CMA-ES runs what it finds in the storage; this would make a file."""

    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was here"),)

    url = f"sqlite:///{tmp_path / 'shared.db'}"
    given: dict[str, Any] = {"objectives": ["loss"], "name": "shared", "baselines": False, "trials": 3}
    session = StudySession.open(JOB, {**RATES, "warmup": (0.0, 0.3)}, storage=url, sampler="random", **given)
    for rate in (0.01, 0.02):
        values = {"optimizer.lr": rate, "warmup": 0.1}
        session.study.enqueue_trial(values)
        trial = session.study.ask()
        suggest(trial, session.definition)
        key = "cma:optimizer:0"
        session.study._storage.set_trial_system_attr(trial._trial_id, key, pickle.dumps(Payload()).hex())
        session.study.tell(trial, 1.0)
    for storage in (url, session.study._storage):
        with pytest.raises(SpecError, match="unpickles data from this storage") as caught:
            opened = StudySession.open(name="shared", storage=storage, sampler=sampler, trials=3)
            suggest(opened.study.ask(), opened.definition)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "was here").exists()


@pytest.mark.parametrize(
    "storage", ["sqlite:////nowhere/at/all.db", "nonsense", "postgresql+psycopg://127.0.0.1:1/x"]
)
def test_a_storage_that_does_not_answer_is_said(storage: str) -> None:
    with pytest.raises(StudyError, match="storage="):
        ss.tune(JOB, RATES, trials=1, name="away", storage=storage)


@pytest.mark.sampled
@pytest.mark.parametrize("sampler", ["auto", "tpe", "gp", "qmc", "nsga", "cma-es", "random"])
def test_every_sampler_goes_through_branches_and_impossible_trials(
    sampler: str, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardscope.tuning.driver.launch", instant(recorded))
    space = {
        "optimizer": ["adamw", "nesterov"],
        "optimizer.lr": (1e-3, 1e-1, "log"),
        "compression": ["onebit-adam", "none"],
    }
    objectives = ["loss"] if sampler == "cma-es" else ["loss", "bytes"]
    ss.tune(COPIED, space, trials=4, name=sampler, sampler=sampler, objectives=objectives)
    assert sum(record.counted for record in StudySession.open(name=sampler).records()) == 4


@pytest.mark.slow
def test_a_driver_that_joins_draws_other_settings_than_the_one_before() -> None:
    given = {"sampler": "random", "baselines": False, "name": "joined"}
    ss.tune(JOB.replace(steps=2), RATES, trials=2, **given)  # type: ignore[arg-type]
    study = ss.tune(JOB.replace(steps=2), RATES, trials=4, **given)  # type: ignore[arg-type]
    assert len({trial.params["optimizer.lr"] for trial in study.trials}) == 4


def test_a_study_goes_on_to_as_many_trials_as_it_was_begun_with() -> None:
    session = StudySession.open(JOB.replace(steps=2), RATES, trials=3, name="begun")
    session.run(timeout_s=0.01)
    assert len(ss.tune(name="begun").get_trials(states=[TrialState.COMPLETE])) == 3


def test_a_password_is_not_shown() -> None:
    with pytest.raises(StudyError) as caught:
        ss.tune(JOB, RATES, trials=1, name="away", storage="postgresql+psycopg://me:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)
    assert "me:***@127.0.0.1:1/x" in str(caught.value)
