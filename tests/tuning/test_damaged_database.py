"""A study whose database is damaged says so, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardscope as ss
from shardscope.tuning.storage import open_storage


@pytest.mark.parametrize("damage", ["half", "zeros", "text"])
def test_a_damaged_database_is_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "study.db"
    url = f"sqlite:///{file}"
    open_storage(url, "study", tmp_path)
    whole = file.read_bytes()
    file.write_bytes(
        {"half": whole[: len(whole) // 2], "zeros": bytes(5000), "text": b"trial,loss\n" * 900}[damage]
    )
    with pytest.raises(ss.StudyError, match=r"study.db' is damaged, or not a database: .*; restore a copy"):
        open_storage(url, "study", tmp_path)
