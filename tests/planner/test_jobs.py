"""Plans for an emulated cluster: every plan is a job, with the time and memory that `predict` gives for the job."""

from __future__ import annotations

import math
from typing import Any

import pytest

import shardscope as ss
from shardscope.planner import Plans
from shardscope.planner.jobs import _seconds
from shardscope.prediction.job import predict_job

CLUSTER = ss.Cluster.emulated(2, "20 Mbit/s", per_node=2, flops="400 MFLOP/s", memory_bandwidth="2 GB/s")
FIX: dict[str, Any] = {
    "tensor": [1, 2], "context": [1, 2], "zero": [0, 2], "micro_batch": 2, "schedule": ["1f1b", "interleaved"],
    "recompute": "none", "sequence_parallel": False,
}  # fmt: skip


def planned(**settings: Any) -> Plans:
    return ss.plan("gpt-nano", CLUSTER, **{"global_batch": 16, "fix": FIX, "top": None, **settings})


@pytest.fixture(scope="module")
def plans() -> Plans:
    return planned()


def test_time_and_memory_of_a_plan_are_the_prediction_of_its_job(plans: Plans) -> None:
    assert len(plans) > 15
    axes = ("data", "tensor", "pipeline", "context")
    assert {axis for plan in plans for axis in axes if getattr(plan.layout, axis) > 1} == {*axes}
    for rank in range(1, len(plans) + 1, 7):
        plan, rehearsal = plans[rank - 1], plans.rehearsal(rank)
        assert rehearsal.cluster == CLUSTER
        found = ss.predict(rehearsal.job, rehearsal.cluster)
        assert plan.step_time_s == rehearsal.step_time_s
        assert plan.step_time_s == pytest.approx(found.step_time_s, rel=1e-12)
        assert plan.memory_bytes == pytest.approx(found.peak_bytes, rel=1e-12)
        assert plan.mfu == found.mfu
        here = rehearsal.job.layout()
        assert all(
            getattr(here, axis) == getattr(plan.layout, axis) for axis in (*axes, "zero", "micro_batch")
        )


def test_plans_are_ranked_by_the_predictions_of_their_jobs(plans: Plans) -> None:
    times = [plan.step_time_s for plan in plans]
    assert times == sorted(times)
    assert plans.by("headroom").best.memory_bytes == min(plan.memory_bytes for plan in plans)


def test_jobs_are_predicted_in_the_order_of_the_formula_until_enough_fit(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardscope.planner.jobs.TIMED", 4)
    some = planned(top=3)
    assert 4 <= len(some.order) < len(plans.order)
    assert len(some) == 3
    assert some.best == plans.best
    assert some.rejected["not timed"] == len(plans.order) - len(some.order)
    assert "beaten" not in some.rejected
    roomy = planned(objective="headroom", top=3)
    assert len(roomy.order) < len(plans.order)
    assert roomy.best.memory_bytes == plans.by("headroom").best.memory_bytes


def test_where_the_smallest_jobs_do_not_fit_no_others_are_predicted(plans: Plans) -> None:
    small = CLUSTER.replace(nodes=tuple(node.replace(memory="1 MB") for node in CLUSTER.nodes))
    none = ss.plan("gpt-nano", small, global_batch=16, fix=FIX)
    assert "none of" in none.problem
    degrees = {(each.layout.tensor, each.layout.pipeline, each.layout.context) for each in plans}
    assert none.rejected["does not fit"] <= 2 * len(degrees) < len(plans)


def test_a_plan_fits_if_its_job_fits() -> None:
    fix = {**FIX, "tensor": 1, "context": 1, "pipeline": 2, "zero": 0, "schedule": "1f1b"}
    (plan,) = (found := planned(fix=fix))
    peaks = [term.value for term in ss.predict(found.rehearsal().job, CLUSTER).by_rank or ()]
    assert peaks[0] > 1.1 * peaks[-1]
    memory = {0: 1.02 * peaks[0], 1: 1.02 * peaks[-1]}
    nodes = tuple(node.replace(memory=memory[place]) for place, node in enumerate(CLUSTER.nodes))
    tight = ss.plan("gpt-nano", CLUSTER.replace(nodes=nodes), global_batch=16, fix=fix, top=None)
    assert [each.layout for each in tight] == [plan.layout]
    assert tight.why(plan.layout) == "it is plan 1 of the table"


def test_a_plan_for_an_emulated_cluster_is_no_other_framework_s(plans: Plans) -> None:
    with pytest.raises(ss.SpecError, match=r"use plans\.rehearsal\(2\)\.job"):
        plans.trainer_config(2)


def test_a_comparison_adds_up_to_the_difference_of_the_predicted_steps(plans: Plans) -> None:
    told = plans.explain(1, len(plans))
    gained = sum(each.gain_s for each in told.differences)
    assert gained == pytest.approx(plans[-1].step_time_s - plans.best.step_time_s)
    assert told.memory_bytes == (plans.best.memory_bytes, plans[-1].memory_bytes)


def test_what_is_recomputed_for_gradients_of_weights_counts_as_recomputed() -> None:
    layout = ss.Layout(
        data=2, pipeline=2, schedule="zero-bubble", recompute="full", global_batch=16, micro_batch=2, precision="fp32"
    )  # fmt: skip
    found = predict_job(ss.Job(model="gpt-nano", data="python-source", layout=layout), CLUSTER)
    assert found.time is not None
    passes = {term.name: term.value for term in found.time.parts}
    parts = _seconds(found.time, found)
    assert parts["recompute"] == pytest.approx(passes["backward"] - 2 * passes["forward"])
    assert parts["recompute"] > 1.2 * passes["forward"]


def test_why_names_what_a_job_cannot_do(plans: Plans) -> None:
    assert plans.why(plans.best.layout) == "it is plan 1 of the table"
    layout = ss.Layout(data=4, zero=1, shard=2, global_batch=16, micro_batch=2, precision="fp32")
    assert "shard=2 with zero=1 is not available in jobs yet" in plans.why(layout)


def test_layouts_that_exceed_the_stated_memory_are_left_out(plans: Plans) -> None:
    data = [plan.memory_bytes for plan in plans if plan.layout.data == 4]
    fix = {**FIX, "data": 4}

    def found(memory: Any) -> Plans:
        small = CLUSTER.replace(nodes=tuple(node.replace(memory=memory) for node in CLUSTER.nodes))
        return ss.plan("gpt-nano", small, global_batch=16, fix=fix, top=None)

    assert len(data) > len(found(min(data))) == data.count(min(data))
    none = found("1 MB")
    assert "none of" in none.problem
    assert "give the cluster more memory" in none.problem


def test_defaults_are_those_of_jobs() -> None:
    fix = {"data": 4, "zero": 0, "micro_batch": 16, "recompute": "none"}
    (plan,) = ss.plan("gpt-nano", CLUSTER, fix=fix)
    assert (plan.layout.global_batch, plan.layout.precision) == (64, "fp32")
    assert not math.isnan(plan.mfu)


@pytest.mark.parametrize(
    ("model", "settings", "told"),
    [
        ("gpt2-large", {}, "'gpt2-large' is not a model that jobs train by its name"),
        ("gpt-nano", {"software": "fsdp2"}, "software='fsdp2' has no effect on this machine's CPU ranks"),
        ("gpt-nano", {"precision": "bf16-mixed"}, "precision='bf16-mixed' keeps weights in 2 bytes"),
        ("gpt-nano", {"calibration": ss.Calibration.of("h100-fsdp")}, "is for a GPU and has no effect"),
    ],
)
def test_what_jobs_cannot_do_is_refused(model: str, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ss.SpecError) as refused:
        ss.plan(model, CLUSTER, **settings)
    assert told in str(refused.value)


@pytest.mark.parametrize("given", [{"world_size": 2}, {"model": "gpt-micro"}])
def test_a_plan_is_rehearsed_as_it_is(plans: Plans, given: dict[str, Any]) -> None:
    with pytest.raises(ss.SpecError, match="of a plan for an emulated cluster, which is rehearsed as it is"):
        plans.rehearsal(**given)
