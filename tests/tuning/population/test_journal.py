"""The journal of a population: torn at any byte, it loses at most the line that was being written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.tuning.population import PopulationError
from shardscope.tuning.population.driver import PopulationDriver, Stopped
from shardscope.tuning.population.journal import Journal, is_held, read_lines
from shardscope.tuning.population.record import (
    Course,
    MemberStart,
    Outcome,
    Plan,
    moves_line,
    outcome_line,
    plan_line,
)

LINES = [
    moves_line(1, [MemberStart(m, None, None, {"optimizer.lr": 0.1 * (m + 1)}, "drawn") for m in (0,)]),
    outcome_line(Outcome(1, 0, "runs/a", {"loss": 1.0}, samples=10, notes=("größer",))),
]


def test_whatever_byte_a_kill_tears_it_at_all_lines_before_are_there_and_all_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a kill takes nothing off the disk's cache
    path = tmp_path / "whole.jsonl"
    with Journal(path) as journal:
        for line in LINES:
            journal.append(line)
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    torn = tmp_path / "torn.jsonl"
    for size in range(len(whole) + 1):
        torn.write_bytes(whole[:size])
        before = sum(end <= size for end in ends)
        assert len(list(read_lines(torn))) == before
        with Journal(torn) as journal:
            for line in LINES[before:]:
                journal.append(line)
        assert Course.of(read_lines(torn)) == Course.of(read_lines(path)), size


def test_a_line_that_is_there_twice_counts_once() -> None:
    again = outcome_line(Outcome(1, 0, "runs/other", {"loss": 9.0}, samples=99))
    course = Course.of([*LINES, again])
    assert course.outcomes[1, 0].scores == {"loss": 1.0}
    assert course.last_interval == 1


def test_a_population_begun_when_more_accuracy_was_better_is_refused_and_one_of_the_users_own_is_not(
    tmp_path: Path,
) -> None:
    own = plan_line(Plan({}, {}, 2, 1, 4, ("accuracy",), 0.25, 0.25, 0, own=("accuracy",)))
    plan = Course.of([json.loads(json.dumps(own))]).plan
    assert plan is not None
    assert plan.own == ("accuracy",)
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append({name: value for name, value in own.items() if name != "own"})
    with pytest.raises(PopulationError, match="""'accuracy'.* with objectives='error'"""):
        _ = ss.Population(tmp_path).best
    loss = plan_line(Plan({}, {}, 2, 1, 4, ("loss",), 0.25, 0.25, 0))
    assert Course.of([{name: value for name, value in loss.items() if name != "own"}]).plan == Plan(
        {}, {}, 2, 1, 4, ("loss",), 0.25, 0.25, 0, own=()
    )


def test_a_population_that_compared_members_on_the_test_split_is_read_and_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise Stopped

    monkeypatch.setattr(PopulationDriver, "run", stopped)
    job, space = ss.Job(model="mlp", data="digits", steps=6), {"optimizer.lr": (1e-3, 1e-1, "log")}
    begun = ss.train_population(job, space, members=2, intervals=2, folder=tmp_path)
    assert begun.plan.split == "validation"
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    plan = {name: value for name, value in json.loads(lines[0]).items() if name != "split"}
    (tmp_path / "journal.jsonl").write_text("\n".join([json.dumps(plan), *lines[1:], ""]))
    assert ss.Population(tmp_path).plan.split == "test"
    with pytest.raises(
        PopulationError, match="compared its members on the test split.* needs a different folder"
    ):
        ss.train_population(job, space, members=2, intervals=2, folder=tmp_path)


def test_there_is_one_writer_and_it_is_private(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert not is_held(path)
    with Journal(path):
        assert is_held(path)
        with pytest.raises(
            PopulationError, match="is being trained by another process; wait for it, or stop"
        ):
            Journal(path)
    assert not is_held(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
