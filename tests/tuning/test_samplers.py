"""Which sampler draws what: by what trials cost, as the storage has it."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import optuna
import pytest
from optuna.samplers import GPSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial
from threadpoolctl import threadpool_info

import shardscope as ss
from shardscope.spec.units import plural
from shardscope.tuning.records import IMPOSSIBLE, NOT_COUNTED
from shardscope.tuning.samplers import ByCost, GaussianProcess, drawn_by, median_seconds, sampler_of
from shardscope.tuning.session import StudySession

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=2)
OPTIMIZER = optuna.distributions.CategoricalDistribution(("adamw", "lamb"))
RATE = optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True)


def ended(
    seconds: float, rate: float, *, state: TrialState = TrialState.COMPLETE, impossible: bool = False
) -> FrozenTrial:
    """A trial that took so long, as a storage holds it."""
    trial = create_trial(
        state=state, values=[rate, 1 / rate] if state == TrialState.COMPLETE else None,
        params={"optimizer": "adamw", "rate": rate}, distributions={"optimizer": OPTIMIZER, "rate": RATE},
        user_attrs={NOT_COUNTED: IMPOSSIBLE} if impossible else {}, constraints={"possible": float(impossible)},
    )  # fmt: skip
    trial.datetime_start = datetime(2026, 1, 1)
    trial.datetime_complete = trial.datetime_start + timedelta(seconds=seconds)
    return trial


def study_of(trials: list[FrozenTrial], sampler: str, storage: str | None = None) -> optuna.Study:
    study = optuna.create_study(
        storage=storage, directions=["minimize"] * 2, sampler=sampler_of(sampler, seed=3, num_objectives=2)
    )
    study.add_trials(trials)
    return study


def draw(study: optuna.Study) -> tuple[str, float, float]:
    """Optimizer, its rate (a branch that no finished trial has), and the rate that all have."""
    trial = study.ask()
    optimizer = trial.suggest_categorical("optimizer", OPTIMIZER.choices)
    return (
        optimizer,
        trial.suggest_float(f"{optimizer}.beta", 0, 1),
        trial.suggest_float("rate", 1e-4, 1e-1, log=True),
    )


def history(seconds: float, count: int = 12) -> list[FrozenTrial]:
    return [ended(seconds, 1e-3 * (k + 1)) for k in range(count)]


@pytest.mark.parametrize("count", [0, 12])
def test_cheap_trials_are_drawn_as_tpe_draws_them_to_the_bit(count: int) -> None:
    auto, tpe = (study_of(history(29.9, count), sampler) for sampler in ("auto", "tpe"))
    drawn = [draw(auto) for _ in range(6)]
    assert drawn == [draw(tpe) for _ in range(6)]
    assert {drawn_by(auto.sampler, count + k) for k in range(6)} == {"tpe"}


@pytest.mark.parametrize(("seconds", "by"), [(29.9, "tpe"), (30.0, "gp")])
def test_dear_trials_are_drawn_by_a_gaussian_process_also_after_a_restart(
    seconds: float, by: str, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    begun = study_of(history(seconds), "auto", url)
    again = optuna.load_study(
        study_name=begun.study_name, storage=url, sampler=sampler_of("auto", seed=0, num_objectives=2)
    )
    draw(again)
    assert drawn_by(again.sampler, 12) == by


def test_what_a_trial_costs_is_the_median_of_those_that_count() -> None:
    pruned = [ended(1.0, 1e-3, state=TrialState.PRUNED, impossible=True) for _ in range(9)]
    failed = [ended(1.0, 1e-3, state=TrialState.FAIL) for _ in range(9)]
    expensive = [ended(seconds, 1e-3) for seconds in (10.0, 40.0, 5000.0)]
    stopped = ended(20.0, 1e-3, state=TrialState.PRUNED)
    assert median_seconds([]) is None
    assert median_seconds([*pruned, *failed, *expensive]) == 40.0
    assert median_seconds([*pruned, *failed, *expensive, stopped]) == 30.0


def test_before_ten_are_complete_and_after_an_impossible_one_tpe_draws_dear_trials_too() -> None:
    def choice(trials: list[FrozenTrial]) -> str:
        study = study_of(trials, "auto")
        assert isinstance(study.sampler, ByCost)
        return type(study.sampler.choose(study.get_trials())).__name__

    impossible = ended(0.1, 1e-2, state=TrialState.PRUNED, impossible=True)
    assert choice(history(60, 9)) == "TPESampler"
    assert choice([*history(60, 9), ended(60, 2e-2)]) == "GaussianProcess"
    assert choice([*history(60), impossible]) == "TPESampler"
    assert choice([*history(60), impossible, ended(60, 2e-2)]) == "GaussianProcess"


def test_a_gaussian_process_has_one_thread_of_blas_and_gives_the_others_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    seen: list[int] = []
    monkeypatch.setattr(GPSampler, "sample_relative", lambda *_: seen.extend(threads()) or {})
    before = threads()
    study = study_of(history(60), "gp")
    draw(study)
    assert set(seen) == {1}
    assert threads() == before


def test_names_of_samplers_are_short_and_of_ones_own_the_class() -> None:
    class Mine(optuna.samplers.BruteForceSampler):
        pass

    assert drawn_by(TPESampler(), 0) == "tpe"
    assert drawn_by(GaussianProcess.seeded(0), 0) == "gp"
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        assert drawn_by(Mine(), 0) == "Mine"


@pytest.mark.slow
def test_the_report_says_who_drew_what_and_seeds_are_nobodys() -> None:
    space = {"optimizer": ["adamw", "nesterov"], "optimizer.lr": (1e-3, 1e-1, "log")}
    ss.tune(JOB, space, trials=4, name="drew", objectives=["loss"], pruner="none")
    session = StudySession.open(name="drew")
    given = [record.number for record in session.records() if record.origin != "drawn"]
    assert given
    assert all((record.sampler is None) == (record.number in given) for record in session.records())
    assert session.report().samplers == (("tpe", 4 - len(given)),)
    assert f"Drawn by a sampler: {plural(4 - len(given), 'trial')} by tpe." in str(session.report())
