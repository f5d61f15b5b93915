"""What is said of a study's trials."""

from __future__ import annotations

import shardscope as ss
from shardscope.tuning.records import AGAIN, ORIGIN
from shardscope.tuning.session import StudySession

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=2)


def test_a_seed_waits_until_the_study_has_all_its_trials_and_again_when_more_are_asked_for() -> None:
    session = StudySession.open(JOB, {"optimizer": ["adamw", "lamb"]}, trials=1, name="few")
    assert {record.state for record in session.records()} == {"waiting"}
    session.study.tell(session.study.ask(), [0.5, 2.0, 3.0])
    first, *others = session.records()
    assert first.state == "complete"
    assert {(record.state, record.counted) for record in others} == {("unused", False)}
    assert session.report().states == (("complete", 1),)
    session.driver.trials = 2
    assert {record.state for record in session.records()[1:]} == {"waiting"}


def test_a_trial_asked_for_again_is_taken_before_the_seeds_that_are_left_and_is_never_unused() -> None:
    session = StudySession.open(JOB, {"optimizer": ["adamw", "lamb"]}, trials=1, name="asked")
    session.study.tell(session.study.ask(), [0.5, 2.0, 3.0])
    session.study.enqueue_trial({"optimizer": "lamb"}, user_attrs={ORIGIN: AGAIN})
    *_, seed, asked = session.records()
    assert (seed.state, asked.state) == ("unused", "waiting")
    assert session.driver._next(session.study.get_trials(), None) is None
    session.driver.trials = 2
    taken = session.driver._next(session.study.get_trials(), None)
    assert taken is not None
    assert taken.number == asked.number
