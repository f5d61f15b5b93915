"""The journal of a population: torn at any byte, it loses at most the line that was being written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shardscope.tuning.population import PopulationError
from shardscope.tuning.population.journal import (
    Course,
    Journal,
    MemberStart,
    Outcome,
    is_held,
    moves_line,
    outcome_line,
    read_lines,
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
