"""Group, note and maker of a run, beside its job; and deleting a run."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance.runs import endless_job, small_job


def test_a_run_has_a_group_a_note_and_a_job_that_knows_neither() -> None:
    run = ss.launch(small_job(steps=3), group="rates").wait(60)
    assert (run.group, run.note, run.made_by) == ("rates", "", None)
    run.note, run.baseline = "a note", "another-run"
    again = ss.Run.attach(run.path)
    assert (again.group, again.note, again.baseline) == ("rates", "a note", "another-run")
    assert again.job == small_job(steps=3)
    again.group = None
    assert (run.group, run.note) == ("mlp on digits", "a note")
    assert [found.id for found in ss.runs(group="mlp on digits")] == [run.id]
    assert ss.runs(group="rates") == []
    (run.path / "about.json").write_text("{damaged")
    assert (run.group, run.note) == ("mlp on digits", "")
    with pytest.raises(ss.SpecError, match="note=3 is not text"):
        run.note = 3  # type: ignore[assignment]
    run.delete()
    assert not run.path.exists()


def test_runs_of_tools_are_hidden_unless_asked_for() -> None:
    run = ss.launch(small_job(steps=1), made_by="check").wait(60)
    assert ss.runs() == []
    assert [found.id for found in ss.runs(all=True)] == [run.id]


def test_a_run_that_has_not_ended_is_not_deleted() -> None:
    run = ss.launch(endless_job())
    with pytest.raises(ss.SpecError, match="has not ended; stop it with run.stop"):
        run.delete()
    run.stop()
    assert run.path.exists()
