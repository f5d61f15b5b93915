"""What cannot be read now is looked at again; only what was read can be damaged, or a request."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from conformance.damage import recorded_run
from shardscope.runlog import files
from shardscope.runtime.agent.agent import Agent
from shardscope.runtime.agent.control import StopControl
from shardscope.runtime.record.rundir import RunDir

PASSING = [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES]


def refusing(number: int, times: int, name: str) -> Callable[..., int]:
    """An `os.open` that refuses a file so many times."""
    left, really = [times], os.open

    def refuse(path: Any, *arguments: Any, **keywords: Any) -> int:
        if Path(path).name == name and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), path)
        return really(path, *arguments, **keywords)

    return refuse


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    return RunDir(recorded_run(runs_root))


@pytest.mark.parametrize("number", PASSING)
def test_a_request_to_stop_that_cannot_be_read_is_none_yet(
    number: int, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent.__new__(Agent)
    agent.run = run
    run.request_stop(7.0)
    monkeypatch.setattr(files.os, "open", refusing(number, 1, "stop"))
    assert [agent._grace_s(), agent._grace_s()] == [None, 7.0]
    run.stop_request.write_text("{")
    assert agent._grace_s() == 0.0


@pytest.mark.parametrize("number", PASSING)
def test_a_log_is_read_again_once_it_can_be(
    number: int, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = ss.Run.attach(run.path)
    monkeypatch.setattr(files.os, "open", refusing(number, 1, "rank-1.jsonl"))
    assert {event["rank"] for event in attached.events()} == {0}
    assert {event["rank"] for event in attached.events()} == {0, 1}
    assert attached.problems == ()


def test_what_is_wrong_with_a_log_for_now_is_said(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    attached = ss.Run.attach(run.path)
    monkeypatch.setattr(files.os, "open", refusing(errno.EMFILE, 1, "rank-1.jsonl"))
    assert attached.problems == ("rank-1.jsonl cannot be read (Too many open files)",)
    assert attached.problems == ()


def test_the_last_step_is_not_missed_because_a_descriptor_was_short(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_control(run.stop_at, "5")
    control = StopControl(run, rank=1, world_size=2)
    monkeypatch.setattr(files.os, "open", refusing(errno.EMFILE, 3, "stop_at"))
    assert control.should_stop(6)


@pytest.mark.parametrize("name", ["stop_at", "approved", "decision"])
@pytest.mark.parametrize("content", [None, "", "soon", "\x00"])
def test_no_rank_hangs_on_or_dies_of_what_lies_in_control(
    name: str, content: str | None, run: RunDir
) -> None:
    file = run.path / "control" / name
    if content is None:
        os.mkfifo(file)
    else:
        file.write_text(content)

    def look() -> None:
        control = StopControl(run, rank=1, world_size=2)
        looked.extend([control.should_stop(1), control._is_told(1), control._is_answered(1)])

    looked: list[bool] = []
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(60)
    assert looked == [False, False, False]


def test_one_bad_link_hides_no_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run.path.parent
    (root / "long").symlink_to("x" * 300)
    (root / "private").symlink_to(root / "of" / "somebody")
    is_dir = Path.is_dir

    def refused(path: Path) -> bool:
        if path.name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refused)
    found = ss.runs()
    assert [each.name for each in found] == ["good"]
    assert {skipped.name for skipped in found.skipped} >= {"private"}
    assert "private (cannot be read (Permission denied))" in found.note


def test_the_note_names_each_run_once(run: RunDir) -> None:
    root = run.path.parent
    bad = [recorded_run(root, name=name) for name in ("one", "two")]
    for path in bad:
        (path / "job.json").write_text("{")
    told = ss.runs().note
    assert told.startswith("2 runs could not be read: ")
    assert all(told.count(path.name) == 1 for path in bad)
    assert told.count("(job.json is not JSON)") == 2


@pytest.mark.parametrize(
    "event",
    [
        {"event": "traffic"}, {"event": "traffic", "step": 1}, {"event": "traffic", "step": 1, "traffic": 5},
        {"event": "traffic", "step": 1, "traffic": {"send": {"sent_bytes": 1, "received_bytes": 1, "sent_to": 5}}},
        {"event": "checkpoint", "step": 1, "traffic": 5}, {"event": "end", "state": "stopped", "traffic": 5},
        {"event": "of another version", "traffic": [1]},
    ],
)  # fmt: skip
def test_an_event_with_traffic_that_is_none_is_left_out(event: dict[str, Any], run: RunDir) -> None:
    from shardscope.runlog.writer import EventWriter

    before = ss.Run.attach(run.path).summary()
    kind = event["event"]
    with EventWriter(run.rank_file(0), 0) as events:
        events.emit(kind, **{key: value for key, value in event.items() if key != "event"})
    attached = ss.Run.attach(run.path)
    assert attached.summary() == before
    assert len(attached.metrics()) == 5
    assert len(attached.problems) == 1


def test_late_traffic_without_details_is_added(run: RunDir) -> None:
    from shardscope.runlog.writer import EventWriter

    attached = ss.Run.attach(run.path)
    (name, *_) = attached.events("step")[0]["traffic"]
    before = attached.metrics()["sent_bytes"].iloc[0]
    with EventWriter(run.rank_file(0), 0) as events:
        events.emit("traffic", step=1, traffic={name: {"sent_bytes": 7, "received_bytes": 0}})
    assert ss.Run.attach(run.path).metrics()["sent_bytes"].iloc[0] == before + 7


def test_waiting_for_a_control_file_that_stays_out_of_reach_ends(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardscope.runtime.agent.control._PATIENCE_S", 0.05)
    monkeypatch.setattr(files.os, "open", refusing(errno.EMFILE, 10**9, "stop_at"))
    run.write_control(run.stop_at, "5")
    began = time.monotonic()
    with pytest.raises(ss.errors.RunUnreadable, match="stop_at cannot be read"):
        StopControl(run, rank=1, world_size=2).should_stop(6)
    assert time.monotonic() - began < 20
