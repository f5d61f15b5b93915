"""Faults at a time: due from the first step on, and no less while the ranks restart."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from shardscope.runlog.tail import read_events
from shardscope.runlog.writer import EventWriter
from shardscope.spec.faults import Faults
from shardscope.training import faults as module
from shardscope.training.faults import RankFaults, RankPlace

PLAN = Faults().kill(0, at=0.15).kill(1, at=0.05).kill(0, at=0.1)


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When this process would have been killed, in seconds from now."""
    found, begun = list[float](), time.time()
    monkeypatch.setattr(module, "_die", lambda: found.append(time.time() - begun))
    return found


def faults(tmp_path: Path, events: EventWriter, plan: Faults = PLAN) -> RankFaults:
    return RankFaults(
        plan, RankPlace(0, 0, is_first=True, world_size=2), tmp_path / "control" / "faults", events
    )


def wait_for(deaths: list[float], count: int) -> None:
    deadline = time.monotonic() + 20
    while len(deaths) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(deaths) == count


def test_they_are_due_from_the_first_step_on_in_their_order(tmp_path: Path, deaths: list[float]) -> None:
    with EventWriter(tmp_path / "rank-0.jsonl", 0) as events:
        own = faults(tmp_path, events)
        time.sleep(0.2)
        assert deaths == [], "nothing is due before the first step"
        own.before_step(7)
        wait_for(deaths, 2)
    assert deaths[0] >= 0.3
    told = [event for event in read_events(tmp_path) if event["event"] == "fault"]
    assert [(event["step"], event["number"]) for event in told] == [(7, 2), (7, 0)]


def test_those_that_became_due_in_a_restart_strike_before_its_first_step(
    tmp_path: Path, deaths: list[float]
) -> None:
    folder = tmp_path / "control" / "faults"
    folder.mkdir(parents=True)
    (folder / "began").write_text(f"{time.time() - 60:.6f}")
    (folder / "2").touch()  # carried out before the restart
    with EventWriter(tmp_path / "rank-0.jsonl", 0) as events:
        faults(tmp_path, events)
        wait_for(deaths, 1)
    (told,) = [event for event in read_events(tmp_path) if event["event"] == "fault"]
    assert (told["step"], told["number"]) == (0, 0)


def test_they_do_not_wait_until_a_link_is_down(tmp_path: Path, deaths: list[float]) -> None:
    with EventWriter(tmp_path / "rank-0.jsonl", 0) as events:
        faults(tmp_path, events, Faults().drop_link("n0-n1", at=0.05).kill(0, at=0.1)).before_step(1)
        wait_for(deaths, 1)
    assert deaths[0] < module._PATIENCE_S / 2, "no agent answers here"
    assert (tmp_path / "control" / "faults" / "0.link").exists()


def test_a_step_waits_until_its_link_is_down(tmp_path: Path) -> None:
    folder = tmp_path / "control" / "faults"

    def agent() -> None:
        while not (folder / "0.link").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        (folder / "0.done").touch()

    threading.Thread(target=agent, daemon=True).start()
    with EventWriter(tmp_path / "rank-0.jsonl", 0) as events:
        own = faults(tmp_path, events, Faults().drop_link("n0-n1", step=2))
        own.before_step(1)
        assert not (folder / "0.link").exists()
        own.before_step(2)
    assert (folder / "0.done").exists()
