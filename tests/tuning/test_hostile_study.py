"""A study written by somebody else executes nothing and changes nothing when it is opened, reported or resumed."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState, create_trial

import shardscope as ss
from shardscope.errors import StudyError
from shardscope.spec.space import Space
from shardscope.tuning.definition import Definition
from shardscope.tuning.records import check_trials
from shardscope.tuning.session import StudySession
from shardscope.tuning.storage import create_or_load, open_storage, without_password

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=4, batch=32)
SPACE = {"optimizer.lr": (1e-3, 1e-1, "log")}
HTML = "<script>alert(1)</script>"


class _Touch:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]


def _hostile_attributes(outside: Path, marker: Path) -> list[dict[str, object]]:
    run = str(outside)
    code = pickle.dumps(_Touch(marker)).hex()
    return [
        {"run": run, "origin": HTML, "reason": HTML * 1000, "sampler": code},
        {
            "run": "../../../../" + run,
            "driver": {"host": HTML, "pid": -1, "name": ["x"]},
            "heartbeat": "never",
        },
        {"run": f"{run}/../{outside.name}", "paused": {"runs": [run], "rung": 10**30}},
        {
            "run": 5,
            "driver": [1],
            "measured": [1, 2],
            "retry_of": "x",
            "paused": "x",
            "seed": {},
            "not_counted": {},
        },
        {"run": None, "driver": "x", "measured": {"alarms": HTML, "loss": "x"}, "paused": {"runs": []}},
        {
            "run": "\x00",
            "paused": {"runs": [None]},
            "pinned": "x",
            "origin": 7,
            "reason": 7,
            "heartbeat": 1e308,
        },
        {"run": {"a": "b"}, "measured": {"unknown": 1}, "retry_of": -5, "cma:optimizer": code, "sampler": 3},
    ]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A run-like folder that no study may touch."""
    folder = tmp_path / "precious"
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    for name in ("job.json", "status.json", "checkpoints/step-1/data"):
        (folder / name).write_text("precious")
    return folder


def _seen(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path): (path.read_text() if path.is_file() else "", path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.sampled
@pytest.mark.parametrize("kind", range(7))
def test_a_hostile_study_executes_nothing_and_writes_nothing_outside(
    kind: int, tmp_path: Path, outside: Path
) -> None:
    storage, marker = f"sqlite:///{tmp_path}/study.db" if kind % 2 else None, tmp_path / "executed"
    attributes = _hostile_attributes(outside, marker)[kind]
    definition = Definition(job=JOB, space=Space(SPACE), objectives=("loss",), baselines=False)
    study = create_or_load(open_storage(storage, "theirs"), "theirs", definition, None)[0]
    distributions = {"optimizer.lr": optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True)}
    for state in (TrialState.RUNNING, TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED):
        study.add_trial(
            create_trial(
                state=state, value=1.0 if state == TrialState.COMPLETE else None, params={"optimizer.lr": 1e-2},
                distributions=distributions, user_attrs=attributes, system_attrs={"cma:optimizer:0": HTML},
            )
        )  # fmt: skip
    study.set_user_attr("trials", 3)
    before = _seen(outside)
    with contextlib.suppress(StudyError):
        session = StudySession.open(name="theirs", storage=storage)
        str(session.report())
        ss.tune(name="theirs", storage=storage, trials=30, progress=False, timeout_s=20)
    assert _seen(outside) == before
    assert not marker.exists()


@pytest.mark.parametrize(
    "text", ["null", "[]", "{}", '{"job": null}', '"x"', "x" * 10**6, json.dumps({"job": "/etc"})]
)
def test_a_study_with_a_damaged_definition_is_refused_in_a_sentence(text: str) -> None:
    study = optuna.create_study(storage=open_storage(None, "damaged"), study_name="damaged")
    study.set_user_attr("shardscope", text)
    with pytest.raises(StudyError, match="damaged") as caught:
        StudySession.open(name="damaged")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@host/db", "postgresql://me:hun@ter2@host/db", "mysql://host/db?user=me&password=hunter2",
        "postgresql+psycopg://host/db?sslpassword=hunter2&sslmode=require", "redis://:hunter2@host", "x://h?api_key=hunter2",
    ],
)  # fmt: skip
def test_no_message_shows_a_password(url: str) -> None:
    assert "hunter2" not in without_password(url) and "ter2" not in without_password(url)
    with pytest.raises(StudyError) as caught:
        ss.tune(JOB, SPACE, storage=url, trials=1, timeout_s=5, progress=False)
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"trials": 10**30}, "trials=1.* is not valid; use an integer from 1 to 1000000"),
        ({"parallel": 10**9}, "parallel=1000000000 is not valid"),
        ({"memory_limit": -1}, "memory_limit=-1 is not valid"),
        ({"memory_limit": 0}, "memory_limit=0 is not valid"),
        ({"memory_limit": float("nan")}, "memory_limit=nan is not valid"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": "soon"}, "timeout_s='soon'"),
    ],
)  # fmt: skip
def test_settings_that_no_study_can_have_are_refused(arguments: dict, says: str) -> None:
    with pytest.raises(ss.SpecError, match=says):
        ss.tune(JOB, SPACE, **{"trials": 1, **arguments})


def test_a_study_in_a_folder_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    with pytest.raises(StudyError, match="cannot be stored in .*root="):
        ss.tune(JOB, SPACE, trials=1, root=taken)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "x", True, 0.5, 10**9, None, []])
def test_a_setting_that_no_driver_has_drawn_is_refused(value: object) -> None:
    space = Space({"batch": (32, 256, "log2")})
    fixed = create_trial(state=TrialState.WAITING, system_attrs={"fixed_params": {"log2(batch)": value}})
    for trial in (fixed, create_trial(state=TrialState.WAITING, system_attrs={"fixed_params": value})):
        with pytest.raises(StudyError, match="which Shardscope does not write"):
            check_trials([trial], space, study="theirs")
