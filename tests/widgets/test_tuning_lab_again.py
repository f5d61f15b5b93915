"""A study that is found again: as it was begun, with what it lacks, in pieces, and where its storage has gone."""

from __future__ import annotations

import shutil

import pytest

import shardscope as ss
from shardscope.errors import SpecError, StudyError
from shardscope.spec.space import Space
from shardscope.tuning.session import StudySession
from shardscope_widgets.tuning_lab import _study
from shardscope_widgets.tuning_lab._chosen import Watched

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=6)
SPACE = Space({"optimizer": ["lamb"], "optimizer[lamb].lr": (1e-3, 1e-1, "log")})


def last_loss(run):
    return float(run.metrics()["loss"].iloc[-1])


@pytest.mark.slow
def test_a_study_opened_by_name_shows_its_own_definition_and_asks_for_its_functions(make_tuning_lab):
    begun = {
        "objectives": {"error": None, "mine": last_loss},
        "baselines": False,
        "equal": "steps",
        "trials": 1,
    }
    StudySession.open(JOB, SPACE, name="mine", **begun).run()
    lab = make_tuning_lab(name="mine")
    assert lab.problem == ""
    assert (lab.trials, lab.objectives, lab.y, lab.x) == (1, ["error", "mine"], "error", "mine")
    assert "mine" in lab.minimise.rows[0]["options"]
    assert [row["number"] for row in lab.screen.table.rows] == [0]
    assert (
        "passed again to continue: use objectives={&#x27;error&#x27;: None, &#x27;mine&#x27;: mine}"
        in lab.screen.plan.value
    )
    with pytest.raises(StudyError, match="minimises mine using your own function"):
        lab.start()

    again = make_tuning_lab(name="mine", objectives={"error": None, "mine": last_loss}, trials=2)
    found = again.definition()
    assert (found.space, found.equal, found.own) == (SPACE, "steps", ("mine",))
    again.start()
    assert again.wait(200)
    assert (again.problem, again.session.definition.space) == ("", SPACE)
    assert [record.state for record in again.session.records()] == ["complete", "complete"]

    other = make_tuning_lab(JOB.replace(steps=9))
    other.name = "mine"  # typed in: that study is asked for, whatever the controls say
    assert other.job() == JOB
    assert "passed again to continue" in other.screen.plan.value
    assert "on the front" in other._summary.html


def test_a_study_of_one_objective_shows_its_trials_in_order(make_tuning_lab):
    lab = make_tuning_lab(JOB, SPACE, objectives="loss")
    assert (lab.x, lab.y) == ("trial", "loss")
    lab.objectives = ["loss", "bytes"]
    assert lab.x == "bytes"


@pytest.mark.slow
def test_a_trial_in_pieces_is_read_from_the_first_to_the_newest(make_tuning_lab):
    session = StudySession.open(JOB, SPACE, name="pieces", trials=2, promote=2, baselines=False)
    session.run()
    [record] = [record for record in session.records() if record.state == "complete"]
    assert len(record.pieces) > 1
    assert record.pieces[-1] == record.run
    watched = Watched(record.pieces[:1])
    watched.poll()
    first = len(watched.trace.steps)
    assert first < JOB.steps
    assert watched.continue_with(record.pieces)
    watched.poll()
    assert [step.number for step in watched.trace.steps] == [*range(1, JOB.steps + 1)]
    assert str(watched.run.path) == record.run
    assert not watched.continue_with(("/elsewhere",))

    lab = make_tuning_lab(name="pieces")
    lab.chosen = record.number
    assert len(lab.screen.chosen.loss.figure["data"][0]["x"]) == JOB.steps
    assert lab.open_run().path == watched.run.path


@pytest.mark.parametrize("name", ["a/b", "..", " spaced", "x" * 300])
def test_a_name_that_no_study_can_have_is_said_beside_the_button(make_tuning_lab, runs_root, name):
    lab = make_tuning_lab(JOB, SPACE)
    lab.name = name
    assert "is not a valid name for a study; use letters" in lab.screen.plan.value
    assert lab.screen.start.disabled
    with pytest.raises(SpecError, match="is not a valid name for a study"):
        lab.start()
    assert not runs_root.exists()


def test_a_storage_that_is_gone_is_one_sentence_for_every_act(make_tuning_lab):
    lab = make_tuning_lab(JOB, SPACE, name="gone", trials=1)
    lab.start()
    assert lab.wait(200)
    lab.chosen = 0
    shutil.rmtree(lab.session.folder)
    for act in (lab.pin, lab.apply, lab.open_run, lab.again):
        with pytest.raises(StudyError, match="no longer exists; restore it or create the study again"):
            act()
    lab.problem = ""
    lab.refresh()
    assert "no longer exists" in lab.problem


def test_looking_for_a_study_leaves_nothing_behind(runs_root):
    assert _study.reopened("nowhere", None, None, {}) is None
    assert not runs_root.exists()
