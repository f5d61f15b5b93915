"""The cost of each axis of a plan, beside that of the small job that stands for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shardscope as ss
from shardscope.planner.rehearsal import Rehearsal
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.runlog.step_events import StepEvent
from shardscope.simulator import step_events_of
from shardscope_widgets.figures._axis_costs import axis_costs_info, axis_costs_table, axis_costs_text
from shardscope_widgets.figures._rank_mesh import rank_mesh_info, rank_mesh_text, waits_of
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.planner._trained import Trained, TrainedPlan
from shardscope_widgets.words import duration_text
from widgets.fake_runs import step_events

DEGREES = {"data": (2, 2), "tensor": (4, 2), "pipeline": (8, 2)}


@pytest.fixture(scope="module")
def rehearsal() -> Rehearsal:
    plans = ss.plan(
        "gpt2-large", ss.Cluster.of("h100", nodes=2, per_node=4), global_batch=64,
        fix={"data": 2, "tensor": 2, "pipeline": 2, "virtual_stages": 1, "context": 1, "offload": "none"},
    )  # fmt: skip
    return plans.rehearsal(step_s=2.0, world_size=8)


@pytest.fixture(scope="module")
def prediction(rehearsal: Rehearsal) -> JobPrediction:
    return predict_job(rehearsal.job, rehearsal.cluster)


def test_all_axes_have_a_planned_and_a_predicted_cost_at_once(
    rehearsal: Rehearsal, prediction: JobPrediction
) -> None:
    info = axis_costs_info(rehearsal, prediction)
    assert info.measured is None
    assert info.predicted is not None
    assert info.planned.seconds.keys() == info.predicted.seconds.keys() == {"data", "tensor", "pipeline"}
    assert prediction.time is not None
    waits = {part.name: part for part in prediction.time.parts}
    bubble = sum(part.value for part in waits["idle"].parts if part.name == "pipeline bubble")
    assert bubble > 0
    assert sum(info.predicted.seconds.values()) == pytest.approx(waits["communication"].value + bubble)
    ranks = rank_mesh_info(prediction)
    assert ranks.seconds == pytest.approx(info.predicted.seconds), (
        "one cost of an axis in the table and in the text"
    )
    pipeline_s = duration_text(info.predicted.seconds["pipeline"])
    assert f"along the pipeline axis in {pipeline_s} with the bubble" in rank_mesh_text(ranks)
    assert axis_costs_text(info).startswith(
        f"In the plan, the {info.planned.ranking[0]} axis costs the most time: "
    )
    table = axis_costs_table(info, DEGREES).text()
    assert "tensor 4, here 2" in table
    assert "pipeline 8, here 2; messages and bubble" in table


def test_the_answer_for_the_plan_is_named_where_the_small_job_has_another(
    rehearsal: Rehearsal, prediction: JobPrediction
) -> None:
    axes = rehearsal.planned_axes_s
    reordered = replace(rehearsal, planned_axes_s={axis: 1 / (1 + seconds) for axis, seconds in axes.items()})
    steps = [step_events_of(prediction)] * 2
    info = axis_costs_info(reordered, prediction, steps)
    assert info.measured is not None
    assert info.measured.step_s == pytest.approx(steps[0].step_time_s)
    text = axis_costs_text(info)
    assert "as measured (median of 2 steps)." in text
    differs = info.measured.ranking[0] != info.planned.ranking[0]
    assert ("For the plan, the first of the two counts" in text) == differs
    same = axis_costs_info(replace(rehearsal, planned_axes_s=dict(info.measured.seconds)), prediction, steps)
    assert "the first of the two counts" not in axis_costs_text(same)


def test_table_and_paragraph_have_one_measured_step(rehearsal: Rehearsal, prediction: JobPrediction) -> None:
    """An exceptional step changes neither of them."""
    usual = step_events_of(prediction)
    steps = [replace(usual, step_time_s=seconds) for seconds in (2.0, 2.1, 7.0)]
    table = axis_costs_table(axis_costs_info(rehearsal, prediction, steps), DEGREES)
    assert "Small job, median of 3 steps" in table.text()
    assert table.rows[0][-1] == "2.1 s"
    paragraph = rank_mesh_text(rank_mesh_info(prediction).measured(*steps))
    assert "In a measured step of 2.1 s (median of 3 steps), a rank sends " in paragraph


@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_a_plan_with_one_axis_has_its_cost(axis: str) -> None:
    """Collectives of a job with one axis do not name it."""
    degrees = {"data": 1, "tensor": 1, "pipeline": 1, "context": 1, axis: 4}
    plans = ss.plan(
        "gpt2", ss.Cluster.of("h100", per_node=4), global_batch=16, fix={**degrees, "offload": "none"}
    )
    rehearsal = plans.rehearsal(step_s=2.0, world_size=4)
    prediction = predict_job(rehearsal.job, rehearsal.cluster)
    info = axis_costs_info(rehearsal, prediction, [step_events_of(prediction)])
    assert info.predicted is not None
    assert info.measured is not None
    assert (
        info.planned.seconds.keys() == info.predicted.seconds.keys() == info.measured.seconds.keys() == {axis}
    )
    assert min(info.predicted.seconds[axis], info.measured.seconds[axis]) > 0
    assert f"the {axis} axis is the only one" in axis_costs_text(info)


def test_a_measured_cost_is_that_of_the_rank_for_which_the_others_wait(prediction: JobPrediction) -> None:
    """Rank 0 computes for 3 s while rank 1 waits in the same all-reduce, which takes 1 s."""
    events = (
        StepEvent(0, "compute", "forward", 0.0, 3.0), StepEvent(0, "communication", "tensor:all_reduce", 3.0, 4.0),
        StepEvent(1, "compute", "forward", 0.0, 1.0), StepEvent(1, "communication", "tensor:all_reduce", 1.0, 4.0),
    )  # fmt: skip
    assert waits_of(replace(step_events_of(prediction), world_size=2, events=events)) == {
        "tensor": pytest.approx(1.0)
    }


def test_a_small_run_is_followed_from_its_start_to_its_end(
    rehearsal: Rehearsal, prediction: JobPrediction, runtime: Any
) -> None:
    problems: list[str] = []
    shown = TrainedPlan(Guard(problems.append))
    planned = rehearsal.job.layout().replace(pipeline=4, global_batch=64)
    run = runtime.launch(rehearsal.job)
    run.step_events = lambda _number: step_events_of(prediction)
    shown.watch(Trained(planned, rehearsal, prediction, run))
    try:
        assert "with data 2 · tensor 2 · pipeline 2 (the plan has 2 · 2 · 4), on 8 ranks." in shown.said.value
        assert "8 ranks are starting; measured costs appear below about 4 s" in shown.status.value
        assert "as predicted" in shown.costs.value
        for step in (1, 2):
            run.write(step_events("ring", 8, step))
            shown._beat()
            assert f"Step {step} of {rehearsal.job.steps} is done" in shown.status.value
            assert ("as measured (1 step)." in shown.costs.value) == (step == 2)
        assert not shown.stop.disabled
        run.state = "completed"
        shown._beat()
        assert "has ended after step 2" in shown.status.value
        assert shown.stop.disabled
    finally:
        shown.close()
    assert problems == []
