"""Dominance pruning: what would have joined the front is kept, what cannot is stopped, and nothing is said too soon."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.errors import SpecError
from shardscope.spec.space import Space
from shardscope.tuning import driver
from shardscope.tuning.definition import Definition
from shardscope.tuning.front import QUICKER_BY
from shardscope.tuning.measured import TrialMetrics
from shardscope.tuning.pruning.outlook import improvement
from shardscope.tuning.pruning.pruners import Finished, ParetoPruner
from shardscope.tuning.session import StudySession

STEPS = 8
JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=STEPS)
SPACE = Space(parameters={"optimizer.lr": (1e-6, 1e-1, "log")})
PRUNER = ParetoPruner(
    Definition(job=JOB, space=SPACE, objectives=("loss", "seconds", "bytes")), least_finished=4
)


def run_of(curve: list[float], seconds: float, sent: float, until: int = STEPS) -> TrialMetrics:
    """What a run of eight steps, evaluated at each, has come to after `until`."""
    return TrialMetrics(
        steps=until, step_s=seconds / STEPS, compute_s=None, codec_s=0.0, bytes=round(sent / STEPS * until), messages=0,
        memory=0, curve=tuple((step + 1, loss, math.nan) for step, loss in enumerate(curve[:until])),
    )  # fmt: skip


def finished(number: int, curve: list[float], seconds: float, sent: float) -> Finished:
    values = {"loss": curve[-1], "seconds": seconds, "bytes": float(round(sent))}
    return Finished(number, values, run_of(curve, seconds, sent))


losses = st.lists(st.floats(0.01, 5), min_size=STEPS, max_size=STEPS)
amounts = st.floats(1, 10)
studies = st.lists(st.tuples(losses, amounts, amounts), min_size=4, max_size=7)


@given(
    studies, st.floats(0.01, 5), st.lists(st.floats(0, 1), min_size=STEPS, max_size=STEPS), amounts, amounts
)
def test_what_would_have_joined_the_front_goes_on(
    others: list[tuple[list[float], float, float]], end: float, shares: list[float], seconds: float, mega: float
) -> None:  # fmt: skip
    trials = [finished(number, curve, t, sent * 8e6) for number, (curve, t, sent) in enumerate(others)]
    curve = []
    for step in range(
        STEPS - 1
    ):  # anything from a bit below its end to where the best improver's gain would bring it
        gain = max(0.0, *(other[step] - other[-1] for other, _, _ in others))
        factor = min(1.0, *(other[-1] / other[step] for other, _, _ in others))
        highest = min(end + gain, end / factor)
        curve.append(0.9 * end + shares[step] * (highest - 0.9 * end))
    curve.append(end)
    joins = not any(
        trial.values["loss"] <= end
        and trial.values["bytes"] <= mega * 8e6
        and trial.values["seconds"] * (1 - QUICKER_BY) <= seconds
        for trial in trials
    )
    said = [
        PRUNER.judge(run_of(curve, seconds, mega * 8e6, until), JOB, trials) for until in range(1, STEPS + 1)
    ]
    assert not joins or said == [None] * STEPS


SLOW = [2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.9, 0.8]
GOOD = [finished(number, [loss / 2 for loss in SLOW], 1.0, 8e6) for number in range(4)]


def test_what_is_beaten_whatever_it_does_is_stopped_with_the_trial_and_the_figures() -> None:
    said = PRUNER.judge(run_of([2.3] * 8, 1.3, 9e6, until=2), JOB, GOOD)
    assert said == (
        "could not beat trial 0, estimated at 25% of its samples from the best improvement so far: "
        "loss 0.4 versus 1.8, seconds 1 s versus 1.3 s, bytes 8 MB versus 9 MB"
    )
    by_chance = PRUNER.judge(run_of([2.3] * 8, 0.95, 9e6, until=2), JOB, GOOD)
    assert by_chance is not None
    assert "seconds 1 s versus 950 ms, which is within noise" in by_chance
    assert PRUNER.judge(run_of([2.3] * 8, 0.85, 9e6, until=2), JOB, GOOD) is None  # quicker than all
    doubtful = replace(PRUNER, quicker_by=-0.5)
    assert doubtful.judge(run_of([2.3] * 8, 1.4, 9e6, until=2), JOB, GOOD) is None
    assert PRUNER.judge(run_of([2.3] * 8, 1.3, 7e6, until=2), JOB, GOOD) is None  # sends least


def test_nothing_is_stopped_before_enough_have_finished_while_it_warms_up_or_near_its_end() -> None:
    bad = run_of([2.3] * 8, 1.3, 9e6, until=2)
    for count in range(4):
        assert PRUNER.judge(bad, JOB, GOOD[:count]) is None
    for until in (7, 8):
        assert PRUNER.judge(run_of([2.3] * 8, 1.3, 9e6, until), JOB, GOOD) is None
    warming = JOB.replace(lr_schedule=ss.LRSchedule("cosine", warmup_steps=2))
    assert PRUNER.judge(bad, warming, GOOD) is None
    assert PRUNER.judge(run_of([2.3] * 8, 1.3, 9e6, until=3), warming, GOOD) is not None
    late = [replace(each, measured=replace(each.measured, curve=each.measured.curve[4:])) for each in GOOD]
    assert PRUNER.judge(bad, JOB, late) is None  # none of them was evaluated that early


@given(
    st.lists(st.sampled_from([math.nan, math.inf, 1.0, 2.3]), min_size=STEPS, max_size=STEPS),
    st.integers(1, STEPS),
)
def test_what_is_no_number_stops_nothing_and_hides_nothing(curve: list[float], until: int) -> None:
    measured = run_of(curve, 1.3, 9e6, until)
    said = PRUNER.judge(measured, JOB, GOOD)
    assert said is None or math.isfinite(curve[until - 1])
    broken = finished(9, [math.nan] * 4 + [1.0] * 4, 9.0, 9e7)
    assert PRUNER.judge(measured, JOB, [*GOOD, broken]) == said


def test_what_costs_the_same_to_the_byte_can_be_beaten_in_loss_alone() -> None:
    alike = run_of([2.3] * 8, 1.0, 8e6 + 3, until=3)
    assert PRUNER.judge(alike, JOB, GOOD) is not None


def test_more_is_expected_of_a_trial_where_nothing_but_quality_tells_it_from_a_finished_one() -> None:
    near = [0.75] * 8  # 0.45 at the gain of the others, who came to 0.4
    cheaper, alike = (
        ParetoPruner(PRUNER.definition.replace(objectives=("loss", "bytes")), least_finished=4),
        run_of(near, 1.0, 8e6, until=4),
    )
    assert cheaper.judge(run_of(near, 1.0, 9e6, until=4), JOB, GOOD) is not None
    assert cheaper.judge(alike, JOB, GOOD) is None


def test_methods_whose_steps_differ_are_held_to_what_they_have_spent() -> None:
    bad = run_of([2.3] * 8, 1.3, 9e6, until=2)
    assert PRUNER.judge(bad, JOB.replace(compression="int8"), GOOD) is not None
    assert PRUNER.judge(bad, JOB.replace(compression="adaptive-bits"), GOOD) is None


def test_the_best_improver_is_the_best_in_each_way() -> None:
    curves = [[(0.5, 2.0), (1.0, 1.0)], [(0.4, 0.4), (1.0, 0.1)], [(0.6, 9.0), (1.0, 0.0)], [(0.5, 3.0)]]
    assert improvement(curves, 0.5) == (1.0, 0.25, 2)
    assert improvement(curves, 0.5).best_end(3.0) == 2.0
    assert improvement([[(0.5, 1.0), (1.0, 1.5)]], 0.5) == (0.0, 1.0, 1)


def test_an_objective_of_ones_own_is_refused() -> None:
    with pytest.raises(SpecError, match="but 'mine' is user-defined"):
        ss.tune(
            JOB, SPACE, objectives={"loss": None, "mine": lambda run: 1.0}, pruner="dominance", name="own"
        )


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"objectives": ["loss", "bytes"]}, "could not beat trial"),
        ({"objectives": ["error"]}, "the pruner 'median' stopped it"),
    ],
)
def test_a_real_trial_that_learns_nothing_is_stopped_early_and_says_why(
    given: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, real = ss.Link(bandwidth="1 Gbit/s", latency="200 ms"), driver.launch

    def launch(job: ss.Job, **rest: Any) -> ss.Run:
        """The hopeless one takes its time, so that it can be stopped."""
        return real(job.replace(link=far) if job.optimizer.lr < 1e-5 else job, **rest)

    monkeypatch.setattr(driver, "launch", launch)
    job = JOB.replace(steps=24, eval_every=3)
    session = StudySession.open(job, SPACE, trials=7, baselines=False, name="real", **given)  # type: ignore[arg-type]
    for rate in (1e-2, 2e-2, 5e-3, 1e-2, 2e-2, 5e-3, 1e-6):
        session.study.enqueue_trial({"optimizer.lr": rate})
    session.run()
    records = session.records()
    assert [record.state for record in records[:4]] == ["complete"] * 4
    last = records[-1]
    assert last.state == "pruned"
    assert said in str(last.reason)
    assert last.measured is not None
    assert 3 <= last.measured.steps < 24
    assert session.trial_run(last.number).state == "stopped"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pruner": "medain"}, "pruner='medain' is not known; did you mean 'median'?"),
        ({"pruner": "median"}, "pruner='median' needs one objective, got loss, seconds, bytes"),
        (
            {"pruner": "hyperband", "objectives": {"mine": len}},
            "the objective 'mine' is neither; use pruner='none'",
        ),
        (
            {"pruner": __import__("optuna").pruners.ThresholdPruner(upper=1.0)},
            "pruner=ThresholdPruner needs one",
        ),
    ],
)
def test_a_pruner_that_cannot_judge_is_refused_before_the_study_begins(
    given: dict[str, object], said: str
) -> None:
    with pytest.raises(SpecError) as caught:
        ss.tune(JOB, SPACE, name="refused", **given)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.sampled
@pytest.mark.parametrize("pruner", ["percentile", "hyperband", "successive-halving", "patient", "none"])
def test_every_pruner_goes_through_real_trials(pruner: str) -> None:
    session = StudySession.open(
        JOB, SPACE, trials=2, objectives=["loss"], pruner=pruner, baselines=False, name=pruner
    )
    session.run()
    states = {record.state for record in session.records()}
    assert states <= {"complete", "pruned"}
    assert "complete" in states
    assert bool(session.study.trials[0].intermediate_values) == (pruner != "none")
