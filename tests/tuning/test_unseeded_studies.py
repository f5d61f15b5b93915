"""Studies whose maker was killed before it had queued their seeds."""

from __future__ import annotations

import time
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage

import shardscope as ss
from shardscope.spec.space import Space
from shardscope.tuning import storage as storage_module
from shardscope.tuning.definition import Definition
from shardscope.tuning.objectives import DEFAULT_OBJECTIVES
from shardscope.tuning.priors import seeds, with_baselines
from shardscope.tuning.session import StudySession
from shardscope.tuning.storage import create_or_load, open_storage

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=64)
SPACE = {"optimizer": ["sgd", "lamb"], "optimizer.lr": (1e-3, 1e-1, "log")}
SEEDED = with_baselines(Space(parameters=SPACE))


def unseeded(name: str) -> tuple[BaseStorage, optuna.Study]:
    """A study that is to have seeds, and has none."""
    definition = Definition(job=JOB, space=SEEDED, objectives=DEFAULT_OBJECTIVES, baselines=True)
    storage = open_storage(None, name)
    return storage, create_or_load(storage, name, definition, None)[0]


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
