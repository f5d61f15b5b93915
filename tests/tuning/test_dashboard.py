"""A study's journal as Optuna's dashboard reads it: through plain Optuna, with nothing of ours loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import shardscope as ss
from shardscope.errors import StudyError
from shardscope.tuning.definition import Definition
from shardscope.tuning.pruning.pruners import ByOptuna
from shardscope.tuning.session import StudySession
from shardscope.tuning.storage import DEFINITION

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=16)
SPACE = {
    "optimizer": ["adamw", "nesterov"],
    "optimizer.lr": (1e-3, 1e-1, "log"),
    "batch": ss.PowersOfTwo(32, 128),
}
_READABLE = 200
"""Characters of an attribute that a page still shows as a line or two."""


def opened(path: Path) -> tuple[JournalStorage, optuna.Study]:
    storage = JournalStorage(JournalFileBackend(str(path)))
    (summary,) = optuna.get_all_study_summaries(storage)
    return storage, optuna.load_study(study_name=summary.study_name, storage=storage)


@pytest.mark.slow
def test_names_directions_and_best_trials_are_there_and_attributes_are_small(runs_root: Path) -> None:
    ss.tune(JOB, SPACE, trials=5, name="shown", pruner="none")
    session = StudySession.open(name="shown")
    storage, study = opened(runs_root / "studies/shown/journal.log")
    assert study.metric_names == ["loss", "seconds", "bytes"]
    assert {direction.name for direction in study.directions} == {"MINIMIZE"}
    clear = {record.number for record in session.front()}
    assert {trial.number for trial in study.best_trials} == clear | {*session.report().by_noise}
    assert study.user_attrs == {
        "job": "mlp on digits: ring, 2 ranks, 16 steps of 64, adamw",
        "trials": 5,
        "seeded": True,
    }
    trials = [trial for trial in study.trials if trial.state.is_finished()]
    assert len(trials) == 5
    for trial in trials:
        assert set(trial.params) == {"optimizer", "optimizer.lr", "log2(batch)"}
        for name, value in trial.user_attrs.items():
            assert len(_line(value)) <= (4 * _READABLE if name == "measured" else _READABLE), name
    held = storage.get_study_system_attrs(study._study_id)[DEFINITION]
    assert Definition.from_json(held) == session.definition


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("promote", [None, 2])
@pytest.mark.parametrize("ends_unseen", [False, True])
def test_a_study_of_one_objective_has_its_curves_as_intermediate_values(
    runs_root: Path, monkeypatch: pytest.MonkeyPatch, ends_unseen: bool, promote: int | None
) -> None:
    if ends_unseen:  # as a run that is over before anybody looks
        monkeypatch.setattr(ByOptuna, "reason", lambda *_: None)
    ss.tune(
        JOB, {"optimizer.lr": (1e-3, 1e-2)}, trials=1, name="curves", objectives=["loss"], pruner="median",
        promote=promote,
    )  # fmt: skip
    _, study = opened(runs_root / "studies/curves/journal.log")
    curve = StudySession.open(name="curves").records()[0].measured.curve  # type: ignore[union-attr]
    told = study.trials[0].intermediate_values
    assert told == {number: loss for number, (_, loss, _) in enumerate(curve, 1)}


def test_what_a_dashboard_writes_does_not_disturb_the_study(runs_root: Path) -> None:
    first = StudySession.open(JOB, SPACE, trials=3, name="noted")
    storage, study = opened(runs_root / "studies/noted/journal.log")
    storage.set_study_system_attr(study._study_id, "dashboard:note_ver", 1)
    study.set_user_attr("remark", "of somebody else")
    study.enqueue_trial({"optimizer": "adamw", "optimizer.lr": 0.02, "log2(batch)": 6})
    again = StudySession.open(JOB, SPACE, name="noted")
    assert again.definition == first.definition
    assert any(record.params.get("optimizer.lr") == 0.02 for record in again.records())


def test_a_storage_that_is_given_as_an_object_has_no_command() -> None:
    session = StudySession.open(JOB, SPACE, name="named")
    other = StudySession.open(JOB, SPACE, name="other", storage=session.study._storage)
    with pytest.raises(StudyError, match="cannot be written in a shell"):
        other.dashboard_command()


def test_the_command_names_the_journal_or_the_storage_without_its_password(tmp_path: Path) -> None:
    session = StudySession.open(JOB, SPACE, name="spaced", root=tmp_path / "my runs")
    assert (
        session.dashboard_command() == f"optuna-dashboard '{tmp_path / 'my runs/studies/spaced/journal.log'}'"
    )
    session.storage = "postgresql+psycopg://me:secret@host/studies"
    assert session.dashboard_command() == "optuna-dashboard 'postgresql+psycopg://me:***@host/studies'"


def _line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)
