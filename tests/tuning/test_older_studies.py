"""Studies of which some things were not written down when they were begun, or whose maker was killed."""

from __future__ import annotations

import json
import time
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage

import shardscope as ss
from shardscope.errors import StudyError
from shardscope.spec.space import Space
from shardscope.tuning import storage as storage_module
from shardscope.tuning.definition import Definition
from shardscope.tuning.objectives import DEFAULT_OBJECTIVES
from shardscope.tuning.priors import seeds, with_baselines
from shardscope.tuning.records import ORIGIN
from shardscope.tuning.session import StudySession
from shardscope.tuning.storage import create_or_load, open_storage

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=64)
SPACE = {"optimizer": ["sgd", "lamb"], "optimizer.lr": (1e-3, 1e-1, "log")}
SEEDED = with_baselines(Space(parameters=SPACE))


def stored(name: str, space: Any, *unwritten: str) -> optuna.Study:
    """A study in a journal, its definition where studies used to have it and without some of its fields."""
    definition = Definition(job=JOB, space=Space(parameters=space), objectives=DEFAULT_OBJECTIVES)
    text = json.loads(definition.model_dump_json())
    for field in unwritten:
        del text[field]
    study = optuna.create_study(
        storage=open_storage(None, name), study_name=name, directions=["minimize"] * len(DEFAULT_OBJECTIVES)
    )
    study.set_user_attr("shardscope", json.dumps(text))
    return study


def test_a_study_that_does_not_say_whether_it_has_baselines_keeps_its_space() -> None:
    stored("unsaid", SPACE, "baselines", "batch_range").ask()
    for given in ({}, {"job": JOB, "space": SPACE, "baselines": False}):
        held = StudySession.open(name="unsaid", **given).definition.space  # type: ignore[arg-type]
        assert held == Space(parameters=SPACE)
    with pytest.raises(StudyError, match="the space has changed in optimizer"):
        StudySession.open(JOB, SPACE, name="unsaid")


def test_a_study_that_compared_trials_on_the_test_split_is_read_and_not_gone_on_with() -> None:
    study = stored("older", SPACE, "split")
    study.add_trial(
        optuna.trial.create_trial(
            params={"optimizer": "sgd", "optimizer.lr": 0.01}, values=[0.5, 1.0, 1.0],
            distributions={
                "optimizer": optuna.distributions.CategoricalDistribution(["sgd", "lamb"]),
                "optimizer.lr": optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True),
            },
        )
    )  # fmt: skip
    session = StudySession.open(name="older", trials=1)
    assert [record.values["loss"] for record in session.records() if record.values] == [0.5]
    assert "Its trials were compared on the test split" in str(session.report())
    assert not session.driver.tick()  # it has all its trials
    for given in ({"job": JOB, "space": SPACE}, {}):
        more = StudySession.open(name="older", trials=2, baselines=False, **given)  # type: ignore[arg-type]
        with pytest.raises(
            StudyError, match=r"compared its trials on the test split.* to run more trials, create a study"
        ):
            more.driver.tick()
    assert len(study.trials) == 1


def unseeded(name: str) -> tuple[BaseStorage, optuna.Study]:
    """A study that is to have seeds, and has none."""
    definition = Definition(job=JOB, space=SEEDED, objectives=DEFAULT_OBJECTIVES, baselines=True)
    storage = open_storage(None, name)
    return storage, create_or_load(storage, name, definition, None)[0]


def test_seeds_that_wait_without_a_number_are_not_queued_again() -> None:
    _, study = unseeded("unnumbered")
    study.enqueue_trial({"optimizer": "sgd", "optimizer.lr": 0.01}, user_attrs={ORIGIN: "default"})
    session = StudySession.open(name="unnumbered")
    assert session.driver.seed is not None
    session.driver.seed()
    assert len(session.study.get_trials()) == 1


def held(storage: BaseStorage) -> list[Any]:
    """All that a storage says of its only study."""
    (study,) = storage.get_all_studies()
    return [study.user_attrs, study.system_attrs, storage.get_all_trials(study._study_id)]


def test_looking_at_a_study_whose_maker_was_killed_neither_waits_nor_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage, _ = unseeded("killed")
    monkeypatch.setattr(storage_module, "STATED_WITHIN_S", 60.0)
    before, began = held(storage), time.monotonic()
    session = StudySession.open(name="killed")
    assert (session.records(), held(storage)) == ([], before)
    assert time.monotonic() - began < 30
    monkeypatch.setattr(storage_module, "STATED_WITHIN_S", 0.1)
    session.driver.trials = 0
    session.driver.tick()
    assert len(session.records()) == len(seeds(JOB, SEEDED, DEFAULT_OBJECTIVES))
    assert session.driver.seed is None
