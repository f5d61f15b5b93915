"""The event log of a rank under several threads."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardscope.runlog import writer
from shardscope.runlog.schema import SCHEMA


def test_the_first_line_states_the_schema_whichever_thread_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, has_begun = writer.encode, threading.Event()

    def slow(event: dict[str, Any]) -> bytes:
        if event["event"] == "first":
            has_begun.set()
            time.sleep(0.3)
        return encode(event)

    monkeypatch.setattr(writer, "encode", slow)
    with writer.EventWriter(tmp_path / "rank-0.jsonl", 0) as events:
        thread = threading.Thread(target=events.emit, args=("first",))
        thread.start()
        assert has_begun.wait(60)
        events.emit("second")
        thread.join(60)
    lines = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [line.get("schema") for line in lines] == [SCHEMA, None]
