"""Settings that have been tried are not tried again, and a study of a finite space ends when all have been."""

from __future__ import annotations

import io
from pathlib import Path
from threading import Thread
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import shardscope as ss
from shardscope.spec.space import Choices, Space
from shardscope.tuning.definition import Definition
from shardscope.tuning.priors import with_baselines
from shardscope.tuning.progress import StudyProgress, trial_line
from shardscope.tuning.records import NOT_COUNTED, OVER_BUDGET, REASON, record_of
from shardscope.tuning.recovery import LOST
from shardscope.tuning.session import StudySession
from shardscope.tuning.untried import all_settings

SPACE: dict[str, Any] = {"optimizer": ["sgd", "adamw"], "batch": (32, 64, "log2")}


def job() -> ss.Job:
    return ss.Job(model="mlp", data="digits", strategy="single", steps=2, eval_every=1, batch=32)


def params_of(session: StudySession) -> list[frozenset[tuple[str, Any]]]:
    """Of the trials that have run."""
    return [frozenset(record.params.items()) for record in session.records() if record.state == "complete"]


@pytest.mark.parametrize(
    ("space", "count"),
    [
        (SPACE, 4),
        ({"optimizer": ["sgd", "adamw"], "optimizer[sgd].momentum": [0.0, 0.5, 0.9]}, 4),
        ({"warmup": (0.0, 0.3)}, None),
        ({"optimizer": ["sgd", "adamw"]}, 2),
        ({"batch": (32, 256, "log2"), "optimizer.lr": (1e-4, 1e-2, "log")}, None),
    ],
)
def test_the_settings_of_a_space_are_counted_by_branch(space: dict[str, Any], count: int | None) -> None:
    definition = Definition(job=job(), space=Space(space), objectives=("loss",))
    found = all_settings(definition)
    assert (None if found is None else len(found)) == count


@pytest.mark.parametrize(
    ("space", "count"),
    [
        (SPACE, 4),
        ({"optimizer": ["sgd", "lamb"], "optimizer[sgd].momentum": [0.0, 0.5, 0.9]}, 4),
        ({"optimizer": ["nesterov", "adamw"]}, 2),
        ({"optimizer": ["sgd"], "warmup": (0.0, 0.3)}, None),
    ],
)
def test_optimizers_that_only_baselines_have_do_not_make_a_space_endless(
    space: dict[str, Any], count: int | None
) -> None:
    drawn = tuple(space["optimizer"])
    definition = Definition(
        job=job(), space=with_baselines(Space(space)), objectives=("loss",), baselines=True, drawn=drawn
    )
    found = all_settings(definition)
    assert (None if found is None else len(found)) == count


@pytest.mark.slow
def test_a_study_with_baselines_ends_when_its_own_settings_have_been_tried(tmp_path: Path) -> None:
    session = StudySession.open(job(), SPACE, trials=30, root=tmp_path)
    session.run(timeout_s=100)
    tried = params_of(session)
    assert len(tried) == len(set(tried))
    assert sum("nesterov" in dict(each).values() for each in tried) <= 1
    assert session.driver.used_up.startswith("All 4 settings of the space have been tried, so the study ends")
    assert not any(trial.state == TrialState.WAITING for trial in session.study.get_trials())


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_a_sampler_that_repeats_itself_in_an_endless_space_ends_the_study(
    tmp_path: Path, parallel: int
) -> None:
    rates = {"optimizer.lr": [1e-3, 1e-2]}
    session = StudySession.open(
        job(), {"optimizer.lr": (1e-4, 1e-1, "log")}, trials=9, root=tmp_path, baselines=False, parallel=parallel,
        sampler=optuna.samplers.GridSampler(rates),
    )  # fmt: skip
    session.run(timeout_s=60)
    tried = params_of(session)
    assert len(tried) == len(set(tried)) == 2
    assert "had been tried 20 times in a row, so the study ends after 2 trials." in session.driver.used_up
    assert len(session.study.get_trials()) < 50


@pytest.mark.sampled
@pytest.mark.parametrize("sampler", ["random", "tpe", "gp"])
def test_a_study_of_four_settings_tries_each_once_and_says_that_it_ends(tmp_path: Path, sampler: str) -> None:
    session = StudySession.open(job(), SPACE, trials=9, sampler=sampler, root=tmp_path, baselines=False)
    said = io.StringIO()
    with StudyProgress(session, stream=said):
        session.run(timeout_s=100)
    tried = params_of(session)
    assert len(tried) == len(set(tried)) == 4
    assert "All 4 settings of the space have been tried, so the study ends after 4 trials." in said.getvalue()


@pytest.mark.sampled
@pytest.mark.slow
def test_two_drivers_share_the_settings_of_a_space(tmp_path: Path) -> None:
    sessions = [
        StudySession.open(
            job(), SPACE, trials=9, sampler="random", name="both", root=tmp_path, baselines=False
        )
        for _ in range(2)
    ]
    threads = [Thread(target=session.run, kwargs={"timeout_s": 100}) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(110)
    tried = params_of(sessions[0])
    assert len(tried) == len(set(tried)) == 4


@pytest.mark.parametrize(
    ("mark", "word"), [(OVER_BUDGET, "skipped"), (LOST, "to be run again"), (None, "failed")]
)
def test_a_trial_that_is_skipped_is_not_said_to_be_run_again(mark: str | None, word: str) -> None:
    attrs = {REASON: "trial 3 has the same settings", **({} if mark is None else {NOT_COUNTED: mark})}
    trial = optuna.trial.create_trial(state=TrialState.FAIL, user_attrs=attrs)
    record = record_of(trial, Space(parameters={"batch": Choices(values=(8, 16))}), ("loss",))
    assert record.counted == (mark is None)
    assert word in trial_line(record)
    assert ("to be run again" in trial_line(record)) == (mark == LOST)
