"""A study whose database is damaged says so, in one sentence."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NoReturn

import optuna
import pytest
from sqlalchemy import exc

import shardscope as ss
from shardscope.tuning import storage
from shardscope.tuning.storage import answering, open_storage


@pytest.mark.parametrize("damage", ["half", "zeros", "text"])
def test_a_damaged_database_is_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "study.db"
    url = f"sqlite:///{file}"
    open_storage(url, "study", tmp_path)
    whole = file.read_bytes()
    file.write_bytes(
        {"half": whole[: len(whole) // 2], "zeros": bytes(5000), "text": b"trial,loss\n" * 900}[damage]
    )
    with pytest.raises(
        ss.errors.StudyError, match=r"study.db' is damaged, or not a database: .*; restore a copy"
    ):
        open_storage(url, "study", tmp_path)


def test_a_damaged_table_is_named_when_the_study_is_opened(tmp_path: Path) -> None:
    """The first page, which is read at once, is whole."""
    file = tmp_path / "study.db"
    url = f"sqlite:///{file}"
    study = optuna.create_study(storage=open_storage(url, "study", tmp_path), study_name="study")
    study.tell(study.ask(), 1.0)
    with sqlite3.connect(file) as database:
        ((page,),) = database.execute("select rootpage from sqlite_master where name = 'trials'")
        ((size,),) = database.execute("pragma page_size")
    database.close()
    content = bytearray(file.read_bytes())
    content[(page - 1) * size : page * size] = b"\xff" * size
    file.write_bytes(content)
    opened = open_storage(url, "study", tmp_path)
    with (
        pytest.raises(
            ss.errors.StudyError, match=r"^the storage of study 'study' is damaged: .*; restore a copy of it"
        ),
        answering("study"),
    ):
        optuna.load_study(storage=opened, study_name="study").get_trials()


def test_a_missing_permission_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> NoReturn:
        raise exc.ProgrammingError("CREATE TABLE", {}, Exception("permission denied for schema public"))

    monkeypatch.setattr(storage, "RDBStorage", denied)
    with pytest.raises(ss.errors.StudyError, match=r"host/db' rejects the call: .*permission denied"):
        open_storage("postgresql://me@host/db", "study", tmp_path)


@pytest.mark.parametrize("url", ["{}", "sqlite://{}", "[]", "sqlite:///{name}", "nothing://here", "\x00"])
def test_a_url_that_is_none_is_refused_in_a_sentence(url: str) -> None:
    with pytest.raises(ss.StudyError, match="is not the URL of a storage|needs a driver"):
        open_storage(url, "study")
