"""Plans in slow motion: a job and an emulated cluster keep the proportions of the plan, and the run takes as long."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from conformance.emulated import needs_namespaces
from conformance.runs import SHORT_TEXT
from shardscope.planner import Plans
from shardscope.planner.rehearsed_job import Small, kept_job, num_micro_batches, small_models, smaller

STAGES = {"data": 1, "tensor": 1, "schedule": "1f1b", "recompute": "none", "micro_batch": 2}
REPLICAS = {"pipeline": 1, "tensor": 1, "zero": 1, "recompute": "none", "micro_batch": 1}
STEP_S = 1.0
ROOMY = ss.Cluster.of("h200").device.replace(memory_bytes="1 TB")


def planned(fix: dict[str, Any], *, per_node: tuple[int, int] = (1, 1)) -> Plans:
    """On one node of new devices, and one of old ones."""
    new, old = (
        ss.Cluster.of(name, nodes=1, per_node=n)
        for name, n in zip(("h100", "v100-32gb"), per_node, strict=True)
    )
    model = (
        "gpt2-xl" if fix is STAGES else "gpt2-large"
    )  # a smaller one has stages that wait for the H100's host
    return ss.plan(model, ss.Cluster.mixed(new, old), global_batch=16, fix=fix)


def test_stages_on_unlike_devices_keep_their_proportions() -> None:
    plans = planned(STAGES)
    rehearsal = plans.rehearsal(step_s=STEP_S)
    job, nodes, strategy = rehearsal.job, rehearsal.cluster.nodes, rehearsal.job.strategy
    assert isinstance(strategy, ss.Pipeline)
    on_fast, on_slow = plans.stage_layers()
    assert on_fast + on_slow == 48
    assert 1.5 < on_fast / on_slow < 2.5
    assert strategy.split == (1 + 3, 1 + 1)  # of 4 blocks, with the embedding and the head
    assert (job.world_size, job.num_micro_batches) == (2, 8)
    assert rehearsal.step_time_s == pytest.approx(STEP_S)
    fast, slow = nodes
    assert fast.flops is not None
    assert slow.flops is not None
    assert fast.flops / slow.flops == pytest.approx(on_fast / on_slow, rel=0.15)
    assert fast.memory_bandwidth is not None
    assert fast.memory_bandwidth > slow.memory_bandwidth > 0  # type: ignore[operator]


@pytest.mark.parametrize(
    "fix",
    [STAGES, REPLICAS, {**REPLICAS, "zero": 2}, {**REPLICAS, "zero": 3}],
    ids=["stages", "zero-1", "zero-2", "zero-3"],
)
def test_a_step_is_predicted_to_take_as_long_as_asked(fix: dict[str, Any]) -> None:
    rehearsal = planned(fix).rehearsal(step_s=2 * STEP_S)
    assert rehearsal.step_time_s == pytest.approx(2 * STEP_S, rel=1e-3)
    assert ss.predict(rehearsal.job, rehearsal.cluster).step_time_s == pytest.approx(rehearsal.step_time_s)


def test_a_plan_that_recomputes_some_layers_is_rehearsed_with_all_and_says_so() -> None:
    cluster = ss.Cluster.of("a100-80gb", nodes=2, per_node=1)
    fix = {**STAGES, "recompute": "full", "recompute_layers": 5}
    rehearsal = ss.plan("gpt2-large", cluster, global_batch=16, fix=fix).rehearsal(step_s=STEP_S)
    assert rehearsal.job.recompute == "full"
    assert (
        "The job recomputes every layer, but the plan only 5 of the 18 layers of a stage." in rehearsal.notes
    )


def test_a_plan_keeps_its_axes_on_fewer_ranks() -> None:
    cluster = ss.Cluster.of("h100", nodes=2, per_node=8)
    fix = {
        "data": 4,
        "tensor": 4,
        "pipeline": 1,
        "context": 1,
        "zero": 1,
        "recompute": "none",
        "offload": "none",
    }
    plans = ss.plan("gpt2-large", cluster, global_batch=64, fix=fix)
    rehearsal = plans.rehearsal(step_s=STEP_S, world_size=4)
    layout = rehearsal.job.layout()
    assert (layout.data, layout.tensor, layout.zero) == (2, 2, 1)
    assert len(rehearsal.cluster.nodes) == rehearsal.cluster.per_node == 2  # a tensor group stays in a node
    assert ss.predict(rehearsal.job, rehearsal.cluster).step_time_s == pytest.approx(STEP_S, rel=1e-3)
    assert layout.sequence_parallel == plans.best.layout.sequence_parallel
    with pytest.raises(
        ss.SpecError, match="data=4, tensor=4 needs 4 ranks to keep its axes, not world_size=2"
    ):
        plans.rehearsal(world_size=2)


@given(st.tuples(*3 * [st.sampled_from([1, 2, 3, 4, 6, 8, 16])]), st.integers(8, 64))
def test_a_smaller_layout_fits_and_has_the_same_axes(degrees: tuple[int, ...], ranks: int) -> None:
    planned = ss.Layout(**dict(zip(("data", "tensor", "pipeline"), degrees, strict=True)))
    found = smaller(planned, ranks)
    here = (found.data, found.tensor, found.pipeline)
    assert found.num_devices <= max(ranks, 1)
    assert [degree > 1 for degree in here] == [degree > 1 for degree in degrees]
    assert all(degree % mine == 0 or mine == 2 for degree, mine in zip(degrees, here, strict=True))


@pytest.mark.parametrize(("experts", "ranks"), [(3, 2), (5, 4), (7, 4), (9, 8)])
def test_a_smaller_layout_keeps_the_expert_axis(experts: int, ranks: int) -> None:
    assert smaller(ss.Layout(data=experts, expert=experts), ranks).expert > 1


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 256))
def test_a_job_has_fewer_micro_batches_with_at_most_the_bubble_of_the_most_that_it_may_have(
    pipeline: int, cut: int, count: int
) -> None:
    planned = ss.Layout(pipeline=pipeline, global_batch=count)
    here = planned.replace(pipeline=max(1, pipeline // cut), schedule="1f1b")
    found = num_micro_batches(planned, here)
    assert here.pipeline <= found <= max(16, 2 * here.pipeline)
    if here.pipeline > 1 and found < 16 - here.pipeline:  # more would not fit
        bubble, ours = (pipeline - 1) / count, (here.pipeline - 1) / found
        assert ours <= bubble * 1.001 or found == here.pipeline


def test_stages_on_one_rank_shorten_the_bubble_of_plan_and_job() -> None:
    planned = ss.Layout(pipeline=4, global_batch=16, schedule="interleaved", virtual_stages=8)
    here = planned.replace(pipeline=2, virtual_stages=4)
    found = num_micro_batches(planned, here)
    assert (here.pipeline - 1) / (found * here.virtual_stages) == pytest.approx(3 / (16 * 8), rel=0.15)


def test_context_ranks_of_a_plan_exchange_gradients_too() -> None:
    fix = {**dict.fromkeys(("data", "tensor", "pipeline"), 1), "context": 4, "offload": "none"}
    plans = ss.plan("gpt2", ss.Cluster.of("h100", per_node=4), global_batch=16, fix=fix)
    assert plans.rehearsal(step_s=STEP_S).planned_axes_s.keys() == {"data", "context"}


def test_a_data_axis_keeps_its_share_of_a_step_that_has_fewer_micro_batches() -> None:
    cluster = ss.Cluster.of("a100-80gb", nodes=2, per_node=1)
    shares = []
    for global_batch in (16, 128):
        plans = ss.plan("gpt2-large", cluster, global_batch=global_batch, fix={**REPLICAS, "data": 2})
        rehearsal = plans.rehearsal(step_s=4 * STEP_S)
        assert rehearsal.job.num_micro_batches == min(global_batch // 2, 16)
        time = ss.predict(rehearsal.job, rehearsal.cluster).time
        assert time is not None
        sent_s = sum(part.value for part in time.parts if part.name == "communication")
        shares.append((rehearsal.planned_axes_s["data"] / rehearsal.planned_s, sent_s / time.value))
    (few, ours), (many, ours_of_many) = shares
    assert many < few / 4
    assert ours_of_many < ours / 2


def test_a_plan_of_all_axes_is_rehearsed_on_eight_ranks() -> None:
    cluster = ss.Cluster.of("h100", nodes=8, per_node=4)
    fix = {
        "data": 2, "tensor": 2, "pipeline": 4, "context": 2, "zero": 1, "virtual_stages": 1, "recompute": "none",
        "offload": "none",
    }  # fmt: skip
    rehearsal = ss.plan("gpt2-large", cluster, global_batch=64, fix=fix).rehearsal(
        step_s=STEP_S, world_size=8
    )
    layout = rehearsal.job.layout()
    assert (layout.data, layout.tensor, layout.pipeline, layout.zero) == (2, 2, 2, 1)
    assert (
        "The rehearsal leaves out context=2 of the plan: a plan with data=2, tensor=2, pipeline=4, context=2 needs 16 "
        "ranks to keep its axes, not world_size=8." in rehearsal.notes
    )
    assert rehearsal.planned_axes_s.keys() == {"data", "tensor", "pipeline", "context"}
    assert sum(rehearsal.planned_axes_s.values()) < rehearsal.planned_s
    assert rehearsal.cluster.per_node < 8  # stages are in several nodes, as planned
    assert ss.predict(rehearsal.job, rehearsal.cluster).step_time_s == pytest.approx(STEP_S, rel=1e-3)


KEPT = {
    "context": ("gpt2-large", {"context": 2, "expert": 1}),
    "expert": ("mixtral-8x7b", {"context": 1, "expert": 2}),
}


@pytest.mark.parametrize("axis", KEPT)
def test_a_plan_keeps_its_context_or_expert_axis(axis: str) -> None:
    model, degrees = KEPT[axis]
    fix = {
        **degrees, "tensor": 1, "pipeline": 1, "zero": 0, "micro_batch": 1, "recompute": "none", "offload": "none",
    }  # fmt: skip
    cluster = ss.Cluster.of("h200", nodes=2, per_node=4).replace(device=ROOMY)
    rehearsal = ss.plan(model, cluster, global_batch=16, fix=fix).rehearsal(step_s=2 * STEP_S, world_size=4)
    layout = rehearsal.job.layout()
    assert (layout.context, layout.expert) == (degrees["context"], degrees["expert"])
    assert rehearsal.job.world_size == 4
    assert not any("leaves out" in note for note in rehearsal.notes)
    assert ss.predict(rehearsal.job, rehearsal.cluster).step_time_s == pytest.approx(2 * STEP_S, rel=1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("model", ["gpt2-xl", "mixtral-8x7b"])
def test_every_plan_is_a_job_on_eight_ranks_that_says_what_it_lacks(model: str) -> None:
    cluster = ss.Cluster.of("h100", nodes=4, per_node=4)
    plans = ss.plan(
        model, cluster, global_batch=64, top=None, fix={"offload": "none", "micro_batch": 1}, software="any"
    )
    for rank in Random(0).sample(range(1, len(plans) + 1), 150):
        planned = plans[rank - 1].layout
        smalls = [
            Small(plans.setting, planned, *each, 5)
            for each in small_models(plans.setting.model, None).items()
        ]
        kept = kept_job(smalls, 8, shrinks=True)
        layout, told = kept.job.layout(), " ".join(kept.notes)
        assert kept.job.world_size <= 8
        for axis in ("data", "tensor", "pipeline", "context", "expert"):
            lost = getattr(planned, axis) > 1 and getattr(layout, axis) == 1
            assert lost == (f"leaves out {axis}=" in told), planned
            assert not lost or axis in ("context", "expert"), planned
        assert layout.zero == planned.zero or layout.data * layout.context == 1


def test_parts_with_another_share_than_planned_are_named() -> None:
    """Messages that the plan hides, and for which this machine needs time."""
    plans = ss.plan(
        "gpt2-large", ss.Cluster.of("a100-80gb", nodes=2, per_node=4), global_batch=64,
        fix={**REPLICAS, "data": 8, "zero": 2, "shard": "all", "micro_batch": 1},
    )  # fmt: skip
    assert "Communication takes" in repr(plans.rehearsal(step_s=3.0))
    assert "takes" not in " ".join(planned(STAGES).rehearsal(step_s=STEP_S).notes)


@pytest.mark.slow
def test_a_rehearsal_takes_as_long_as_predicted_and_its_split_pays_as_planned() -> None:
    needs_namespaces()
    rehearsal = planned(STAGES).rehearsal(step_s=STEP_S, steps=3)
    ours = rehearsal.job.replace(data=SHORT_TEXT)  # the evaluation is emulated, too
    even = ours.replace(strategy=ours.strategy.replace(split=(3, 3)))
    found = []
    for job in (ours, even):
        run = ss.launch(job, rehearsal.cluster).wait(100)
        row = ss.compare(run)["time", "step"]
        assert row.simulated == pytest.approx(row.predicted, rel=0.15)
        assert row.measured is not None
        fastest = min(run.metrics()["step_time_s"])  # the one that other programs have disturbed least
        assert fastest == pytest.approx(row.predicted, rel=0.15)
        found.append((row.predicted, fastest))
    gain, measured = (slow / fast for fast, slow in zip(*found, strict=True))
    assert gain > 1.15
    assert measured == pytest.approx(gain, rel=0.15)


def test_what_this_machine_cannot_keep_up_with_is_said() -> None:
    plans = planned(STAGES)
    assert "too much for the" in repr(plans.rehearsal(model="gpt-small", step_s=0.1))
    with pytest.raises(ss.SpecError, match="step_s=1e-06 is too short for 2 ranks on this machine"):
        plans.rehearsal(step_s=1e-6)


@pytest.mark.parametrize(
    ("fix", "per_node", "settings", "told"),
    [
        (
            {**REPLICAS, "data": 4},
            (2, 2),
            {"world_size": 2},
            "on unlike devices each rank stands for one of the plan's 4",
        ),
        (REPLICAS, (1, 1), {"world_size": True}, "world_size=True is not a number of ranks"),
        (STAGES, (1, 1), {"model": "mlp"}, "model='mlp' is not a transformer"),
        (STAGES, (1, 1), {"step_s": 0.0}, "step_s=0.0 is not a step time"),
        (STAGES, (1, 1), {"step_s": float("inf")}, "step_s=inf is not a step time"),
        (STAGES, (1, 1), {"step_s": "1 s"}, "step_s='1 s' is not a step time"),
        (STAGES, (1, 1), {"rank": 0}, "rank=0 is not a position in the ranking; use 1 to"),
        (STAGES, (1, 1), {"rank": 10**6}, "rank=1000000 is not a position"),
        ({**STAGES, "pipeline": 4}, (3, 1), {}, "groups with 1 and 3 devices per node"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_with_what_to_plan_instead(
    fix: dict[str, Any], per_node: tuple[int, int], settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ss.SpecError) as refused:
        planned(fix, per_node=per_node).rehearsal(**settings)
    assert told in str(refused.value)
